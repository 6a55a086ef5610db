"""Container images without a registry: docker-archive files, cached by the hash of what they are made from."""
