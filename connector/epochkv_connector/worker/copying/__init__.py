"""Bytes between GPU blocks and host slots: how blocks and slots are laid out, and who copies on which device. Knows no job."""
