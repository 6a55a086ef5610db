"""Front end of the fence's simulator (`tests/model`) for runs of any length, replays, and the check of the checker."""
