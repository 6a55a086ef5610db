"""Which block is where in the tiers, and which transfers are under way. `manager` puts the parts together.

Pure: no randomness, no vLLM, no clock, no thread; time, ids and the block pool are arguments.
"""
