"""`make demo` and `make demo-stock`: the main job on real parts, every claim checked. `journey.py` is what the e2e test runs too."""
