"""Values as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Short: 4s, 3m12s, 5h07m, 2d3h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"
