"""Which block is where in the tiers, and which transfers are under way. Pure: no vLLM, no clock, no thread."""
