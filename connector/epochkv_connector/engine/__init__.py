"""Everything that imports vLLM: its interface, its unstable names and its plugin entry point.

Each module says which names of vLLM it knows, and in which versions. Elsewhere in the connector are only objects that vLLM
gives: requests, outputs of a step, and in `weights/` a worker's models and layers.
"""
