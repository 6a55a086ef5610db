"""The epoch protocol of EpochKV: which epoch an engine may name its KV with, and the proof that nobody uses an older one.

`agent` and `hub` are pure state machines, `messages` what they say to each other, `authority` what a hub must remember,
`transport` the sockets around them. Needs neither Kubernetes nor vLLM.
"""
