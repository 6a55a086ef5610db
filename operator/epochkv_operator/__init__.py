"""The EpochKV operator: KV-cache pools and inference engines on Kubernetes, and the fence hub that resets them."""

from epochkv_fence.version import VERSION

__version__ = VERSION or "0+checkout"
