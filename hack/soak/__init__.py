"""A long run of three real engines, a store and a hub under random faults, resets and weight changes: `make soak`."""
