"""What the connector counts, and how vLLM and Prometheus get it."""
