"""Key material in Secrets: the hub's key pair, and per pool a client key pair and the secret in block names."""
