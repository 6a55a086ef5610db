"""What the release workflow does beside building: compare versions with the tag, and package the chart for a registry.

    python -m hack.release check --tag v0.1.0
    python -m hack.release chart --publish-to ghcr.io/you --digest operator=sha256:... --digest store=... ... --out dist

Needs the standard library only, and Helm on PATH for `chart`. Nothing names an owner: a fork releases into its own registry.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts/epochkv"
IMAGES = ("operator", "store", "engine", "connector")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ReleaseError(ValueError):
    """The release cannot be made; the message says what to change, and where."""


def versions(root: Path = ROOT) -> dict[str, str]:
    """Where a version stands -> the version."""
    chart = (root / "charts/epochkv/Chart.yaml").read_text()
    found = {"pyproject.toml": str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])}
    for key in ("version", "appVersion"):
        line = re.search(rf'^{key}: "?([^"\n]+)"?$', chart, re.MULTILINE)
        found[f"charts/epochkv/Chart.yaml: {key}"] = line[1] if line else ""
    return found


def check(tag: str, root: Path = ROOT) -> str:
    """The version that is released.

    Raises:
        ReleaseError: a place has another version than the tag.
    """
    version = tag.removeprefix("v")
    wrong = [f"{place} is {found or 'missing'}" for place, found in versions(root).items() if found != version]
    if wrong:
        raise ReleaseError(
            f"tag {tag} wants version {version}, but {', '.join(wrong)}: set all of them to one version, and tag that commit"
        )
    return version


def released_values(values: str, registry: str, version: str, digests: Mapping[str, str]) -> str:
    """`values.yaml` whose images are those of a release: each by its digest. Comments stay.

    Raises:
        ReleaseError: a digest is missing or no digest, or the file has changed its form.
    """
    for image in IMAGES:
        if not DIGEST.fullmatch(digests.get(image, "")):
            raise ReleaseError(f"--digest {image}=sha256:... is missing or no digest: {digests.get(image)!r}")
    changes = {
        "  repository: epochkv/operator\n": f"  repository: {registry}/epochkv-operator\n",
        '  digest: ""\n': f"  digest: {digests['operator']}\n",
        '  storeImage: ""\n': f"  storeImage: {registry}/epochkv-store:{version}@{digests['store']}\n",
        '  engineImage: ""\n': f"  engineImage: {registry}/epochkv-engine:{version}@{digests['engine']}\n",
        '  connectorImage: ""\n': f"  connectorImage: {registry}/epochkv-connector:{version}@{digests['connector']}\n",
    }
    for old, new in changes.items():
        if values.count(old) != 1:
            raise ReleaseError(f"charts/epochkv/values.yaml has {values.count(old)} lines {old.strip()!r}, expected one")
        values = values.replace(old, new)
    return values


def package(registry: str, digests: Mapping[str, str], out: Path, helm: str = "helm") -> Path:
    """The chart of this checkout for a registry, packaged by Helm; the path of the archive.

    Raises:
        ReleaseError: see `released_values`.
        subprocess.CalledProcessError: Helm failed; it has said why.
    """
    version = versions()["charts/epochkv/Chart.yaml: version"]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(CHART, Path(folder) / "epochkv")
        values = copy / "values.yaml"
        values.write_text(released_values(values.read_text(), registry, version, digests))
        subprocess.run([helm, "lint", "--quiet", str(copy)], check=True)
        subprocess.run([helm, "package", str(copy), "--destination", str(out)], check=True, stdout=subprocess.DEVNULL)
    return out / f"epochkv-{version}.tgz"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.release", description="Parts of a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="print the version, or fail when a place has another one than the tag")
    checking.add_argument("--tag", required=True)
    packaging = commands.add_parser("chart", help="package the chart with the images of a registry, and print its path")
    packaging.add_argument("--publish-to", required=True, help="registry and path in it, such as ghcr.io/you")
    packaging.add_argument("--digest", action="append", default=[], metavar="IMAGE=sha256:...")
    packaging.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.command == "check":
            print(check(given.tag))
        else:
            print(package(given.publish_to, dict(part.partition("=")[::2] for part in given.digest), given.out))
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
