"""Benchmarks of the operator; see `python -m bench.operator -h`."""
