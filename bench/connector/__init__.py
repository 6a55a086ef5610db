"""Benchmarks of the connector: the two tiers, the bookkeeping, the store, the chat trace; see `python -m bench.connector -h`."""
