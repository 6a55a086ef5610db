"""Build images with Debian's buildah from the repository's real Dockerfiles; the base comes from mmdebstrap instead of a registry."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hack.cluster.binaries import Report, cache_root
from hack.cluster.provider import ClusterError, check_installed
from hack.images import recipe
from hack.images.recipe import Image

_KEPT = 2  # archives kept for each image
# As in Debian's own images: without these, every `apt-get update` in a Dockerfile leaves 80 MB of indexes in its layer.
_APT_OPTIONS = ('Dir::Cache::pkgcache ""', 'Dir::Cache::srcpkgcache ""', 'Acquire::Languages "none"', 'APT::Install-Recommends "false"')
_SECRETS = "/run/epochkv-build"  # where host files appear inside builds


class Builder:
    """One image store under the cache folder; calls from several processes wait for each other."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.folder = cache_root() / "images"
        self.architecture = platform.machine()

    def archive(self, image: Image) -> Path:
        """Where the docker-archive of an image's present content lies, built or not."""
        return self.folder / f"{image.name}-{recipe.image_key(image, self.architecture)}.tar"

    def ensure(self, images: Sequence[Image]) -> list[Path]:
        """Build what has changed; the archives in the order asked for."""
        archives = [self.archive(image) for image in images]
        todo = [(image, path) for image, path in zip(images, archives, strict=True) if not path.exists()]
        if not todo:
            return archives
        self._check_machine()
        with self._locked():
            base = self._base()
            for image, path in todo:
                if not path.exists():
                    self._build(image, base, path)
        return archives

    # -- base --------------------------------------------------------------------------------------------------------

    def _base(self) -> str:
        """Reference of the base image in the store."""
        key = recipe.base_key(self.architecture)
        reference = f"localhost/epochkv/base:{key}"
        if self._buildah("images", "--quiet", reference, check=False).returncode == 0:
            return reference
        started = time.monotonic()
        self.report(f"base image: Debian {recipe.SUITE} (about 60 s)")
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".base-") as name:
            folder = Path(name)
            root = folder / "root"
            self._bootstrap(root, folder / "mmdebstrap.log")
            dockerfile = folder / "Dockerfile"
            dockerfile.write_text('FROM scratch\nCOPY root /\nCMD ["bash"]\n')
            self._logged(
                ["bud", "--isolation", "chroot", "--tag", reference, "--file", str(dockerfile), str(folder)],
                folder / "build.log",
            )
        self.report(f"base image: done after {time.monotonic() - started:.0f} s")
        return reference

    def _bootstrap(self, root: Path, log: Path) -> None:
        """Debian as it is today, its updates included, in one run of apt."""
        mirror = os.environ.get("EPOCHKV_DEBIAN_MIRROR", "http://deb.debian.org/debian")
        sources = [
            f"deb {url} {suite} main"
            for url, suite in (
                (mirror, recipe.SUITE),
                (mirror, f"{recipe.SUITE}-updates"),
                (mirror.removesuffix("/debian") + "/debian-security", f"{recipe.SUITE}-security"),
            )
        ]
        # With a merged /usr from the start, as in Debian's own images: what merges it afterwards would bring all of Perl.
        options = ["--variant=minbase", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", "--dpkgopt=force-unsafe-io"]
        options += [f"--include={','.join(['usr-is-merged', *recipe.BASE_PACKAGES])}"]
        options += [f"--aptopt={option}" for option in _APT_OPTIONS]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C"}
        env["TMPDIR"] = "/tmp"  # package scripts use it, and the caller's folder is not in there
        with log.open("wb") as output:
            # Own namespaces: package scripts leave neither mounts nor processes behind.
            command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "mmdebstrap", *options, recipe.SUITE, str(root), *sources]
            done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, env=env, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ClusterError(f"mmdebstrap failed while making the base image:\n{tail}")
        for name in ("resolv.conf", "hostname"):
            (root / "etc" / name).unlink(missing_ok=True)

    # -- images --------------------------------------------------------------------------------------------------------

    def _build(self, image: Image, base: str, path: Path) -> None:
        started = time.monotonic()
        self.report(f"image {image.reference}: building (about {image.expected_seconds} s when nothing is cached)")
        log = self.folder / f"{image.name}.log"
        with tempfile.TemporaryDirectory(prefix="epochkv-build-") as name:
            command = ["bud", "--layers", "--isolation", "chroot", "--network", "host", "--build-arg", f"BASE_IMAGE={base}"]
            command += self._host_settings(Path(name))
            command += [f"--build-context={name}={folder}" for name, folder in image.contexts.items()]
            command += [f"--build-arg={name}={value}" for name, value in image.arguments.items()]
            if image.target:
                command += ["--target", image.target]
            command += ["--tag", f"localhost/{image.reference}", "--file", str(recipe.ROOT / image.dockerfile)]
            self._logged([*command, str(recipe.ROOT)], log)
        staging = path.with_suffix(".tmp")
        staging.unlink(missing_ok=True)
        self._logged(["push", f"localhost/{image.reference}", f"docker-archive:{staging}:{image.reference}"], log)
        staging.rename(path)
        self._prune(image, path)
        size = path.stat().st_size / 1e6
        self.report(f"image {image.reference}: {size:.0f} MB after {time.monotonic() - started:.0f} s")

    def _host_settings(self, folder: Path) -> list[str]:
        """Mounts that let pip inside a build use the caller's index, proxy certificates and time-outs. Nothing of it stays."""
        text, paths = recipe.pip_conf(os.environ)
        (folder / "pip.conf").write_text(text)
        volumes = [f"{folder / 'pip.conf'}:/etc/pip.conf:ro"]
        for number, path in enumerate(paths):
            inside = f"{_SECRETS}/{number}"
            text = text.replace(f"= {path}\n", f"= {inside}\n")
            volumes.append(f"{path}:{inside}:ro")
        (folder / "pip.conf").write_text(text)
        return [word for volume in volumes for word in ("--volume", volume)]

    def _prune(self, image: Image, newest: Path) -> None:
        """Keep the newest archives of an image, and no dangling layers."""
        files = sorted(self.folder.glob(f"{image.name}-????????????.tar"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in [file for file in files if file != newest][_KEPT - 1 :]:
            file.unlink(missing_ok=True)

    # -- tools ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _command(self, args: Sequence[str]) -> list[str]:
        store = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "store-run")]
        return ["buildah", *store, "--storage-driver", "overlay", *args]

    def _buildah(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self._command(args), check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if check and done.returncode != 0:
            raise ClusterError(f"buildah {args[0]} failed: {done.stderr.strip()[-2000:]}")
        return done

    def _logged(self, args: Sequence[str], log: Path) -> None:
        with log.open("ab") as output:
            done = subprocess.run(self._command(args), check=False, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise ClusterError(f"buildah {args[0]} failed (exit {done.returncode}); the end of {log}:\n{tail}")

    @staticmethod
    def _check_machine() -> None:
        if os.geteuid() != 0:
            raise ClusterError("building images without Docker needs root (mmdebstrap and buildah's chroot isolation)")
        check_installed({tool: tool for tool in ("buildah", "mmdebstrap")})
