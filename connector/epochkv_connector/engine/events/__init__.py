"""KV events, for routers that send a prompt to the engine that holds its blocks."""
