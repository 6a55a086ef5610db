"""What hub, agents and trainers agree on: messages, an engine's half of the fence, what a hub asks of its durable memory. Pure."""
