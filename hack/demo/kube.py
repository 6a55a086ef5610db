"""Reaching a cluster from this machine, on any provider: kubectl for what a user would type, and requests to the API server.

HTTP to pods goes through the API server's pod proxy, so that neither routes to pod addresses nor port-forwards are needed.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from hack.engine_api import EngineApi, EngineError, headers_of

Json = dict[str, Any]
JSON_BODY: Final = headers_of()


class DemoError(RuntimeError):
    """A step failed; the message says which object and what it said."""


class Kube:
    """One cluster, as its admin. `kubectl` is the path of the binary."""

    def __init__(self, kubeconfig: Path, kubectl: Path) -> None:
        self.kubeconfig = kubeconfig
        self._kubectl = kubectl
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._server = str(cluster["server"])
        self._tls = ssl.create_default_context(cadata=_material(cluster, "certificate-authority").decode())
        with tempfile.TemporaryDirectory() as folder:
            for name in ("client-certificate", "client-key"):
                (Path(folder) / name).touch(mode=0o600)
                (Path(folder) / name).write_bytes(_material(user, name))
            self._tls.load_cert_chain(Path(folder) / "client-certificate", Path(folder) / "client-key")

    # -- what a user would type ----------------------------------------------------------------------------------------

    def command(self, *args: str) -> list[str]:
        return [str(self._kubectl), f"--kubeconfig={self.kubeconfig}", *args]

    def kubectl(self, *args: str, seconds: float = 120.0, stdin: str | None = None) -> str:
        """Run kubectl; its output.

        Raises:
            DemoError: kubectl's own words.
        """
        try:
            done = subprocess.run(self.command(*args), capture_output=True, text=True, timeout=seconds, input=stdin, check=False)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"kubectl {' '.join(args)}: no end after {seconds:.0f} s") from error
        if done.returncode != 0:
            raise DemoError(f"kubectl {' '.join(args)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = JSON_BODY, seconds: float = 30.0
    ) -> tuple[int, bytes]:
        """Status and body of one request to the API server. Raises OSError when there is no answer.

        A GET without an answer is asked again for three times `seconds`: a busy machine may stand still for half a minute, and the API
        server may lose its etcd.
        """
        deadline = time.monotonic() + 3 * seconds
        while True:
            try:
                with self._open(method, path, body, headers, seconds) as response:
                    return response.status_code, response.read()
            except OSError:
                if method != "GET" or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def get(self, path: str) -> Json:
        """One object; raises DemoError with the server's words."""
        status, body = self.request("GET", path)
        if status != HTTPStatus.OK:
            raise DemoError(f"GET {path}: {status} {body.decode(errors='replace')[:500]}")
        found: Json = json.loads(body)
        return found

    def watch(self, path: str, seconds: float) -> Iterator[Json]:
        """Objects of a watch, oldest first, beginning with what is there; ends after `seconds`."""
        query = f"{path}&watch=true&timeoutSeconds={max(1, int(seconds))}"
        with self._open("GET", query, None, JSON_BODY, seconds + 5) as response:
            if response.status_code != HTTPStatus.OK:
                raise DemoError(f"watch {path}: {response.status_code} {response.read().decode(errors='replace')[:500]}")
            for line in response.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise DemoError(f"watch {path}: {event['object'].get('message')}")
                yield event["object"]

    @contextmanager
    def _open(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds: float) -> Iterator[httpx.Response]:
        """By HTTP/2: of HTTP/1.1, the API server's proxy cuts one answer of ten from a busy pod after 4 KiB. It closes the request's body
        with the first bytes of the answer, which fails where the last look for more of that body is still to come.
        """
        headers = {**headers, "Accept": "application/json, */*"}
        try:
            with (
                httpx.Client(http2=True, verify=self._tls, timeout=seconds, trust_env=False) as client,
                client.stream(method, f"{self._server}{path}", content=body, headers=headers) as answer,
            ):
                yield answer
        except httpx.HTTPError as error:
            raise OSError(f"{method} {path}: {error!r}") from error

    # -- pods ----------------------------------------------------------------------------------------------------------

    def pods(self, namespace: str, selector: str) -> list[Json]:
        """Pods with these labels that are not being deleted, by name."""
        found = self.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector.replace('=', '%3D')}")["items"]
        return sorted((pod for pod in found if not pod["metadata"].get("deletionTimestamp")), key=lambda pod: str(pod["metadata"]["name"]))

    def pod_http(
        self,
        namespace: str,
        pod: str,
        port: int,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = JSON_BODY,
        seconds: float = 60.0,
    ) -> tuple[int, bytes]:
        """One HTTP request to a port of a pod, through the API server."""
        proxy = f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}"
        return self.request(method, proxy, body, headers, seconds)

    def engines(self, namespace: str, engine: str, model: str) -> list[PodEngine]:
        pods = self.pods(namespace, f"epochkv.io/engine={engine}")
        return [PodEngine(self, namespace, pod["metadata"]["name"], model) for pod in pods if pod_ready(pod)]


class PodEngine(EngineApi):
    """A vLLM server in a pod, port 8000. `rank`: the data-parallel rank that is to answer; None: vLLM chooses."""

    def __init__(self, kube: Kube, namespace: str, pod: str, model: str, rank: int | None = None) -> None:
        self.name, self.model = pod, model
        self._kube, self._namespace = kube, namespace
        self._headers = headers_of(rank)

    def request(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> bytes:
        try:
            status, answer = self._kube.pod_http(self._namespace, self.name, 8000, method, path, body, self._headers, seconds)
        except OSError as error:
            raise EngineError(f"{self.name} {path}: no answer: {error}") from error
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            raise EngineError(f"{self.name} {path}: HTTP {status}: {answer.decode(errors='replace')[:500]}")
        return answer


def pod_ready(pod: Json) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def condition(obj: Json, name: str) -> Json:
    """A condition of an object's status; empty when it is not there."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == name), {})


def _material(section: Json, name: str) -> bytes:
    """A certificate or key of a kubeconfig, inline or in a file."""
    if inline := section.get(f"{name}-data"):
        return base64.b64decode(inline)
    return Path(section[name]).read_bytes()
