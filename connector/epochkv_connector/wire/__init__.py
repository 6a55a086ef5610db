"""What the two halves of the connector send each other."""
