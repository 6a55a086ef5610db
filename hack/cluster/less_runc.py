#!/usr/bin/env python3
"""runc where root lacks capabilities, such as CAP_SYS_RESOURCE: Docker gives all of them to a privileged container, and runc refuses.

Takes from what is to run (a bundle's, or an exec's) what this process may not have, then becomes runc. No import of this project: Docker
runs the file itself.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

# By their numbers, from 0 (capability.h).
NAMES = (  # noqa: SIM905
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST "
    "NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE "
    "SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM "
    "BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
).split()


def missing() -> set[str]:
    """Names of capabilities that this process cannot have."""
    lines = Path("/proc/self/status").read_text().splitlines()
    bound = int(next(line.split()[1] for line in lines if line.startswith("CapBnd")), 16)
    return {f"CAP_{name}" for number, name in enumerate(NAMES) if not bound >> number & 1}


def specification(words: list[str]) -> Path | None:
    """The file of a runc command line that says what is to run."""

    def after(*flags: str) -> str | None:
        return next((value for flag, value in pairwise(words) if flag in flags), None)

    if "create" in words or "run" in words:
        return Path(after("--bundle", "-b") or ".") / "config.json"
    process = after("--process", "-p") if "exec" in words else None
    return Path(process) if process else None


if __name__ == "__main__":
    path = specification(sys.argv[1:])
    if path and path.exists():
        spec = json.loads(path.read_text())
        granted = spec.get("process", spec).get("capabilities") or {}
        for kind, names in granted.items():
            granted[kind] = [name for name in names or [] if name not in missing()]
        path.write_text(json.dumps(spec))
    os.execvp("runc", ["runc", *sys.argv[1:]])
