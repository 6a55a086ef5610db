"""The thread in an engine that holds its lease."""
