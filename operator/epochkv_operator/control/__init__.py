"""The control loop: watches (those of pools and engines are kopf's) fill a queue, workers reconcile, the reporter writes statuses."""
