"""A pool without Kubernetes: one directory holds its record, its keys and the folder that engines join with."""
