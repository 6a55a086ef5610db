"""Real Kubernetes clusters on one machine without Docker (`local`), or through kind where Docker is (`kind`)."""
