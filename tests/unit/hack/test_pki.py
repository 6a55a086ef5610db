"""Certificates, checked by openssl itself."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
from pathlib import Path

import pytest

from hack.cluster.pki import Pki


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    found = Pki(tmp_path / "pki")
    found.ensure_ca()
    return found


def _text(path: Path, *options: str) -> str:
    command = ["openssl", "x509", "-in", str(path), "-noout", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_certificates_verify_and_carry_who_and_where(pki: Pki) -> None:
    pki.ensure("kubelet", "system:node:n1", groups=["system:nodes"], hosts=["IP:10.0.0.1", "DNS:n1"])
    verify = ["openssl", "verify", "-CAfile", str(pki.ca), "-purpose", "sslserver", "-verify_hostname", "n1", str(pki.crt("kubelet"))]
    assert subprocess.run(verify, check=False, capture_output=True).returncode == 0
    assert _text(pki.crt("kubelet"), "-subject").strip().replace(" ", "") == "subject=O=system:nodes,CN=system:node:n1"
    assert "IP Address:10.0.0.1" in _text(pki.crt("kubelet"), "-ext", "subjectAltName")


def test_a_client_certificate_is_not_one_for_servers(pki: Pki) -> None:
    pki.ensure("admin", "admin", groups=["system:masters"])
    verify = ["openssl", "verify", "-CAfile", str(pki.ca), "-purpose"]
    assert subprocess.run([*verify, "sslclient", str(pki.crt("admin"))], check=False, capture_output=True).returncode == 0
    assert subprocess.run([*verify, "sslserver", str(pki.crt("admin"))], check=False, capture_output=True).returncode != 0


def test_keys_are_private_and_kept(pki: Pki) -> None:
    pki.ensure("admin", "admin")
    for name in ("ca", "admin", "service-account"):
        assert stat.S_IMODE(pki.key(name).stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in pki.folder.iterdir()}
    pki.ensure_ca()
    pki.ensure("admin", "admin")
    assert {path: path.read_bytes() for path in pki.folder.iterdir()} == before


def test_kubeconfig_embeds_the_files(pki: Pki, tmp_path: Path) -> None:
    pki.ensure("admin", "admin")
    path = pki.kubeconfig(tmp_path / "k", "admin", "https://10.0.0.1:6443")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config = json.loads(path.read_text())
    user = config["users"][0]["user"]
    assert base64.b64decode(user["client-key-data"]) == pki.key("admin").read_bytes()
    assert base64.b64decode(user["client-certificate-data"]) == pki.crt("admin").read_bytes()
    cluster = config["clusters"][0]["cluster"]
    assert cluster["server"] == "https://10.0.0.1:6443"
    assert base64.b64decode(cluster["certificate-authority-data"]) == pki.ca.read_bytes()
