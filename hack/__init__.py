"""Developer tooling: local clusters and images. Not part of the distribution."""
