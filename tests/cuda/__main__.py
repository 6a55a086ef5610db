"""`make test-cuda`: copies on this machine's GPU, from a plain checkout: torch and the standard library, nothing installed."""

import platform
import sys
import unittest

import torch


def main() -> int:
    """Say what this machine is, run every test; the process's exit status."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}", flush=True)
    else:
        print(f"skipped: torch finds no CUDA device here ({versions}); only what CPUs can show runs", flush=True)
    suite = unittest.defaultTestLoader.loadTestsFromNames(["tests.cuda.test_copies"])
    result = unittest.TextTestRunner(verbosity=2 if torch.cuda.is_available() else 1).run(suite)
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
