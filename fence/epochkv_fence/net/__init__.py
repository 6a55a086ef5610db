"""Sockets and threads around the state machines: ZeroMQ ROUTER/DEALER with CURVE."""
