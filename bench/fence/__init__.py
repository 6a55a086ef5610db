"""Benchmarks of the fence: real hubs, agents and trainers in processes of their own, over real sockets."""
