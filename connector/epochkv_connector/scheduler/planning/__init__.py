"""From a prompt to a plan: what the tiers can give to it, asked without waiting, held until vLLM accepts it."""
