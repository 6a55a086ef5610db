"""A hub with its sockets, timers and calls to the authority and to stores, for all its pools."""
