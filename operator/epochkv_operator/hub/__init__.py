"""The fence hub inside the operator: its Kubernetes authority and its wiring to the control loop."""
