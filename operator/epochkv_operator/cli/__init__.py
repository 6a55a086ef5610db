"""What people ask about pools and engines on Kubernetes: commands of `epochkv`, added by entry points (`epochkv.commands`).

Each module here has one command, as a `typer.Typer` app. At its top it imports nothing of the operator: the commands of a trainer start
beside it. Exit statuses are each command's own; 1 is an error.
"""
