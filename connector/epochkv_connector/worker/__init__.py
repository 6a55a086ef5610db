"""The worker role, one per rank: moves bytes between GPU blocks, host slots and the L2 store, and acknowledges jobs."""
