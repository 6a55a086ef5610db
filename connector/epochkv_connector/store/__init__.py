"""The L2 tier: a Mooncake store behind a state machine that never blocks, never raises and never returns foreign bytes."""
