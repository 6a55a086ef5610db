"""Who may speak to a hub, and in whose turn: the socket with its keys, rates, refusals and fairness."""
