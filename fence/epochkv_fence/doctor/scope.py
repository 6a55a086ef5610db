"""Which part of a cluster is looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterScope:
    """Options of the command.

    Attributes:
        namespace: of pools and engines; None: all.
        operator_namespace: None: wherever an operator is found.
        hub: address that is dialled instead of the pools' own; None: theirs.
    """

    namespace: str | None = None
    operator_namespace: str | None = None
    hub: str | None = None
