"""Everything that imports vLLM: its interface, its unstable names and its plugin entry point.

`interface` says which versions were tested. The rest of the connector imports nothing of vLLM (import-linter checks that). It only
reads objects that vLLM passes in: requests, outputs of a step, models and layers.
"""
