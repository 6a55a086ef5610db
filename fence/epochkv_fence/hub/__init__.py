"""The hub's half of the fence: one state machine per pool. Pure."""
