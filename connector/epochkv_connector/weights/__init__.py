"""Which weights and adapters the ranks of this engine hold, found out by looking."""
