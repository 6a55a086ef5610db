"""What blocks are named: fingerprint, roots, keys, and when a request's names end."""
