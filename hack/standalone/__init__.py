"""A pool without Kubernetes, on loopback: Mooncake, a hub and vLLM engines as plain processes of this machine.

What `make demo-stock`, the engine tests and the benchmarks run on. Real parts throughout: the hub is the one of `epochkv hub`.
"""
