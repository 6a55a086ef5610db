"""Routers that follow KV events: Dynamo's own indexer as a process, and the rules of llm-d and AIBrix written anew.

Dynamo's comes from its package on PyPI. Neither Go module is to be had in a version that could be built here: llm-d's in the module
proxy (`llm-d-kv-cache-manager` 0.8.0) reads events as arrays only and forgets nothing at `AllBlocksCleared`; AIBrix's is not there.
"""
