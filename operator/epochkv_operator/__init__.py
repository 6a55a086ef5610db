"""The EpochKV operator: KV-cache pools and inference engines on Kubernetes, and the fence hub that resets them."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("epochkv")
except PackageNotFoundError:  # run from a checkout
    __version__ = "0+checkout"
