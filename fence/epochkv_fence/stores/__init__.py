"""What a hub can have done to a pool's store as a whole."""
