"""Our fence in an engine that has vLLM's own connectors, or none: `EPOCHKV_FENCE=1`, and this package's plugin.

`switch` says whether an engine wants the fence and can have it, `connectors` which connectors of vLLM can stand behind it, and `fence`
drives the scheduler role, without tiers, from vLLM's scheduler.
"""
