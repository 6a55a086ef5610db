"""The operator under API faults, kills and random valid edits; see `python -m hack.chaos -h`."""
