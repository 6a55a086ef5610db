"""Moves bytes between GPU blocks and host slots: layouts, the host region, and copies for each kind of device. Knows no jobs."""
