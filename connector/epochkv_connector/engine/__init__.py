"""Everything that imports vLLM: its interface, its unstable names and its plugin entry point.

Each module says which names of vLLM it knows, and in which versions. The rest of the connector imports nothing of vLLM
(import-linter checks that). It only reads objects that vLLM passes in: requests, outputs of a step, models and layers.
"""
