"""The EpochKV operator: KV-cache pools and inference engines on Kubernetes, and the fence hub that resets them."""
