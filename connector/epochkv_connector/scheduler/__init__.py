"""The scheduler half's bookkeeping: which block is where, who holds it, what is under way.

Pure: no clock, no randomness, no vLLM; time, ids and the block pool are arguments. All of it runs on vLLM's scheduler
thread and takes no locks.
"""
