"""The command `epochkv`: a pool's hub without Kubernetes, and everything a trainer or a person asks of a pool."""
