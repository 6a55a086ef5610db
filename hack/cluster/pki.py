"""Keys and certificates of a cluster, made with the openssl command line (no Python package needed).

Everything is P-256: making a key takes milliseconds. Certificates live 30 days; a cluster is meant to live for hours.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hack.cluster.provider import ClusterError

_DAYS = "30"


def _openssl(*args: str, stdin: str | None = None) -> str:
    try:
        done = subprocess.run(["openssl", *args], check=True, capture_output=True, text=True, input=stdin)
    except FileNotFoundError as error:
        raise ClusterError("openssl is not installed: it makes the cluster's certificates (apt-get install openssl)") from error
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"openssl {args[0]} failed: {error.stderr.strip()}") from error
    return done.stdout


class Pki:
    """A certificate authority in a folder. Files are `<name>.crt` and `<name>.key` (mode 0600)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def ca(self) -> Path:
        """The certificate that everything in the cluster trusts."""
        return self.folder / "ca.crt"

    def crt(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def ensure_ca(self) -> None:
        """Make the authority and the service-account signing key unless they are there."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.ca.exists():
            self._new_key("ca")
            _openssl(
                "req", "-x509", "-new", "-key", str(self.key("ca")), "-out", f"{self.ca}.tmp", "-days", _DAYS,
                "-subj", "/CN=epochkv-local-ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
            )  # fmt: skip
            os.rename(f"{self.ca}.tmp", self.ca)
        if not self.key("service-account").exists():
            self._new_key("service-account")
        if not self.folder.joinpath("service-account.pub").exists():
            staging = str(self.folder / ".service-account.pub.tmp")
            _openssl("pkey", "-in", str(self.key("service-account")), "-pubout", "-out", staging)
            os.rename(staging, self.folder / "service-account.pub")

    def ensure(self, name: str, common_name: str, *, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        """Make a certificate for client and, with `hosts` (`IP:1.2.3.4`, `DNS:name`), server use, unless it is there."""
        if self.crt(name).exists():
            return
        self._new_key(name)
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={common_name}"
        request = _openssl("req", "-new", "-key", str(self.key(name)), "-subj", subject)
        extensions = [
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=clientAuth" + (",serverAuth" if hosts else ""),
        ]
        if hosts:
            extensions.append("subjectAltName=" + ",".join(hosts))
        config = self.folder / f"{name}.ext"
        config.write_text("\n".join(extensions) + "\n")
        serial = str(int.from_bytes(os.urandom(8), "big"))
        certificate = _openssl(
            "x509", "-req", "-CA", str(self.ca), "-CAkey", str(self.key("ca")), "-days", _DAYS,
            "-set_serial", serial, "-extfile", str(config), stdin=request,
        )  # fmt: skip
        config.unlink()
        staging = self.folder / f".{name}.crt.tmp"
        staging.write_text(certificate)
        staging.rename(self.crt(name))

    def _new_key(self, name: str) -> None:
        staging = self.folder / f".{name}.key.tmp"
        staging.touch(mode=0o600)
        staging.write_text(_openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"))
        staging.rename(self.key(name))

    def kubeconfig(self, path: Path, name: str, server: str) -> Path:
        """Write a kubeconfig (mode 0600) with this authority and the certificate of `name` embedded. JSON is valid YAML."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(kubeconfig(server, self.ca, self.crt(name), self.key(name)), indent=1))
        return path


def kubeconfig(server: str, ca: Path, crt: Path, key: Path) -> dict[str, object]:
    """The kubeconfig object for one server and one client certificate, all data embedded."""
    from base64 import b64encode

    def data(path: Path) -> str:
        return b64encode(path.read_bytes()).decode()

    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "epochkv", "cluster": {"server": server, "certificate-authority-data": data(ca)}}],
        "users": [{"name": "user", "user": {"client-certificate-data": data(crt), "client-key-data": data(key)}}],
        "contexts": [{"name": "epochkv", "context": {"cluster": "epochkv", "user": "user"}}],
        "current-context": "epochkv",
    }
