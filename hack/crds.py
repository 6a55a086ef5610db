"""`python -m hack.crds check|release`: the CRDs must take what those of the last release took.

crdify compares the schemas: fields, types, enums, bounds, defaults, what is required. It knows nothing of CEL, and the API server does
not judge again what an update leaves alone, so `tests/cluster/test_api_compatibility.py` also upgrades a real API server.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hack.cluster.binaries import build

CRDS = Path(__file__).resolve().parents[1] / "crds"
RELEASED = CRDS / "released"
ACCEPTED = "accepted.yaml"
# Descriptions may change. What crdify does not know it would report whole: CEL rules, and the list types that a rule of the linter holds.
_CONFIG = {"unhandledEnforcement": "None", "validations": [{"name": "description", "enforcement": "None"}]}

Json = dict[str, Any]


@dataclass(frozen=True, order=True)
class Break:
    """A change that may break an object, a client or a controller."""

    crd: str
    path: str
    check: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.crd} {self.path}: {self.check}: {self.text}"


def breaks(released: Path, current: Path) -> list[Break]:
    """What changed incompatibly between two folders of CRDs, and what is accepted without happening."""
    crdify = build().path("crdify")
    found = [one for file in sorted(released.glob("epochkv.io_*.yaml")) for one in _compare(crdify, file, current / file.name)]
    accepted = {(entry["crd"], entry["path"], entry["check"]) for entry in yaml.safe_load((released / ACCEPTED).read_text()) or []}
    seen = {(one.crd, one.path, one.check) for one in found}
    stale = [Break(*entry, f"stands in {ACCEPTED}, and did not happen: remove it") for entry in sorted(accepted - seen)]
    return [one for one in found if (one.crd, one.path, one.check) not in accepted] + stale


def release(current: Path = CRDS, released: Path = RELEASED) -> None:
    """Take the current CRDs as those of the last release."""
    for file in released.glob("epochkv.io_*.yaml"):
        file.unlink()
    for file in current.glob("epochkv.io_*.yaml"):
        shutil.copy(file, released)
    head = [line for line in (released / ACCEPTED).read_text().splitlines() if line.startswith("#")]
    (released / ACCEPTED).write_text("\n".join([*head, "[]"]) + "\n")


def _compare(crdify: Path, old: Path, new: Path) -> list[Break]:
    name = old.stem.removeprefix("epochkv.io_")
    if not new.is_file():
        return [Break(name, "^", "existingCrdRemoval", "the CRD is gone")]
    with tempfile.TemporaryDirectory() as folder:
        sides = [_plain(file, Path(folder) / f"{side}.yaml") for side, file in (("old", old), ("new", new))]
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_CONFIG))
        command = [str(crdify), "--config", str(config), "-o", "json", *(f"file://{side}" for side in sides)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError as error:
        raise SystemExit(f"crdify ended with {done.returncode}: {done.stderr or done.stdout}") from error
    rows = [("^", check) for check in report.get("crdValidation") or []]
    for part in ("sameVersionValidation", "servedVersionValidation"):
        rows += [(path, check) for paths in (report.get(part) or {}).values() for path, checks in paths.items() for check in checks]
    return sorted(Break(name, path, check["name"], text) for path, check in rows for text in check.get("errors") or [])


def _plain(file: Path, to: Path) -> Path:
    """Without the `anyOf` that says int-or-string a second time: crdify takes its branches for the field itself."""
    to.write_text(yaml.safe_dump(_without_branches(yaml.safe_load(file.read_text()))))
    return to


def _without_branches(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_branches(item) for item in node]
    if not isinstance(node, dict):
        return node
    twice = node.get("x-kubernetes-int-or-string") is True
    return {key: _without_branches(value) for key, value in node.items() if not (twice and key == "anyOf")}


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 compatible, or released; 1 a change breaks somebody."""
    parser = argparse.ArgumentParser(prog="python -m hack.crds", description=__doc__)
    parser.add_argument("what", choices=["check", "release"])
    if parser.parse_args(arguments).what == "release":
        release()
        print("crds/released now has the CRDs as they are: commit it with the release")
        return 0
    found = breaks(RELEASED, CRDS)
    for one in found:
        print(one, file=sys.stderr)
    if found:
        print(f"take it back, or add it to crds/released/{ACCEPTED} with a reason", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
