"""The scheduler role: vLLM's questions, and what answers them.

`role` puts the parts together that vLLM's calls go to: `requests` (admission), `steps`, and `weight_changes` at any time.
They share one state, with one record for each request. All of it runs on vLLM's scheduler thread and takes no locks.
"""
