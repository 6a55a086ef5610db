"""What the scheduler role and the worker role send each other."""
