"""The control loop: kopf drives the watches, the workers reconcile, the status writer reports."""
