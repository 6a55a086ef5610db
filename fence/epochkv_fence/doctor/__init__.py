"""What `epochkv doctor` looks at without Kubernetes: a connection file, its hub, the hub's engines, the store.

`judging` is pure. The operator's package adds checks of a cluster, and uses `finding` and `running` for them, too.
"""
