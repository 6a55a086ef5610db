"""The epoch protocol of EpochKV: which epoch an engine may name its KV with, and the proof that nobody uses an older one.

`protocol` has the engine's state machine, the messages and what a hub must remember; `hub` has the hub's state machine. Both are
pure: `net` runs them on sockets. Nothing here needs Kubernetes or vLLM.
"""
