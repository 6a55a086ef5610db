"""The scheduler half's bookkeeping: which block is where, who holds it, what is under way.

Everything but `core.py` is pure: no vLLM, no clock, no randomness; time and ids are arguments. All of it runs on vLLM's scheduler
thread and takes no locks.
"""
