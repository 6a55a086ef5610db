"""A real Kubernetes control plane (etcd, API server, controller manager) as plain processes on loopback, in about five seconds.

No node, no root needed: what tests of CRDs, admission, RBAC, ownership and watches run against.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from hack.cluster.binaries import Binaries, locate
from hack.cluster.config import Layout, apiserver_args, audit_args, controller_manager_args, etcd_args, write_credentials
from hack.cluster.process import Component, ProcessTable
from hack.cluster.provider import ClusterError
from hack.loopback import free_ports
from hack.waiting import poll

COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager")
_START_SECONDS = 90.0  # a busy two-core machine; usually 5


class _Kept(threading.local):
    """Idle connections of a thread, by server. They are closed with it."""

    def __init__(self) -> None:
        self.connections: dict[str, http.client.HTTPSConnection] = {}


_kept = _Kept()


class Api:
    """GET and server-side apply as the cluster's admin."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def request(
        self, method: str, path: str, body: object = None, content_type: str = "application/json", timeout: float = 5
    ) -> tuple[int, bytes]:
        """Status and body of one request. Raises OSError when there is no answer.

        Reads of a thread share a connection, as a handshake costs more than the read. One that the API server has closed meanwhile is
        replaced. Writes have connections of their own: a lost answer must not send them twice.
        """
        if method == "GET" and (kept := _kept.connections.pop(self._layout.server, None)) is not None:
            with contextlib.suppress(http.client.HTTPException, ConnectionError):
                return self._send(kept, method, path, body, content_type, timeout)
        try:
            return self._send(self._connect(timeout), method, path, body, content_type, timeout)
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        pki, url = self._layout.pki, urlsplit(self._layout.server)
        context = ssl.create_default_context(cafile=str(pki.ca))
        context.load_cert_chain(pki.crt("admin"), pki.key("admin"))
        return http.client.HTTPSConnection(url.hostname or "", url.port, context=context, timeout=timeout)

    def _send(
        self, connection: http.client.HTTPSConnection, method: str, path: str, body: object, content_type: str, timeout: float
    ) -> tuple[int, bytes]:
        keep = False
        try:
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            data = None if body is None else json.dumps(body)
            connection.request(method, path, body=data, headers={"Content-Type": content_type})
            response = connection.getresponse()
            answer = response.status, response.read()
            keep = method == "GET" and not response.will_close
            return answer
        finally:
            if keep:
                _kept.connections[self._layout.server] = connection
            else:
                connection.close()

    def ok(self, path: str) -> bool:
        """True when a GET answers 200."""
        try:
            return self.request("GET", path)[0] == 200
        except OSError:
            return False

    def apply(self, path: str, obj: object) -> None:
        """Create or update one object by server-side apply; raises OSError with the server's message."""
        status, answer = self.request("PATCH", f"{path}?fieldManager=epochkv-cluster&force=true", obj, "application/apply-patch+yaml", 15)
        if status not in (200, 201):
            raise OSError(f"apply {path}: {status} {answer.decode(errors='replace')[:500]}")


class ControlPlane:
    """Context manager over one control plane whose state lies in `directory` (short path; removed by `close`).

    Opening a directory whose control plane is still up attaches to it; dead components are started again.
    """

    def __init__(
        self, directory: Path | str, *, binaries: Binaries | None = None, api_server_flags: Sequence[str] = (), audited: str = ""
    ) -> None:
        """`audited`: a user whose requests the API server writes to `audit_log`."""
        self._audited = audited
        self.directory = Path(directory).absolute()
        self.audit_log = self.directory / "audit.jsonl"
        """One JSON document per answered request of the audited user."""
        self.table = ProcessTable(self.directory)
        self._binaries = binaries or locate()
        self._api_server_flags = tuple(api_server_flags)
        self._layout: Layout | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.end_processes()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start what is not running and wait until the API server is ready and the default service account exists."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_credentials(self.layout)
        dead = [name for name in COMPONENTS if not self.table.alive(name)]
        for name in dead:
            self.table.forget(name)
        for name in COMPONENTS:
            if name in dead:
                self._launch(name)
            if name == "kube-apiserver":
                self.wait_ready()
        self._wait(lambda: self.api.ok("/api/v1/namespaces/default/serviceaccounts/default"), "the controller manager")

    def close(self) -> None:
        """End every process (by pid and start time) and remove the directory."""
        self.end_processes()
        shutil.rmtree(self.directory, ignore_errors=True)

    def end_processes(self) -> None:
        for component in reversed(self.table.all()):
            component.end(grace=0)  # The API server drains for a minute on SIGTERM; nothing here is worth that.
            self.table.forget(component.name)

    # -- what tests use --------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Ports and folders; chosen once and kept in the directory, so that a restart keeps its address."""
        if self._layout is None:
            file = self.directory / "ports.json"
            if file.exists():
                ports = json.loads(file.read_text())
            else:
                ports = free_ports(3)
                file.write_text(json.dumps(ports))
            api, etcd, peer = ports
            self._layout = Layout(self.directory, "127.0.0.1", api, etcd, peer, "10.96.0.0/16", "10.96.0.1")
        return self._layout

    @property
    def api(self) -> Api:
        return Api(self.layout)

    @property
    def url(self) -> str:
        """`https://127.0.0.1:PORT`."""
        return self.layout.server

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the admin (group system:masters)."""
        return self.layout.kubeconfig("admin")

    @property
    def kubectl(self) -> Path:
        return self._binaries.path("kubectl")

    @property
    def helm(self) -> Path:
        """The pinned Helm."""
        return self._binaries.path("helm")

    def kubeconfig_for(self, user: str, groups: tuple[str, ...] = ()) -> Path:
        """Kubeconfig with a client certificate for a user without any right of its own."""
        name = f"user-{user.replace(':', '-').replace('/', '-')}"
        self.layout.pki.ensure(name, user, groups=groups)
        return self.layout.pki.kubeconfig(self.directory / f"{name}.kubeconfig", name, self.url)

    def component(self, name: str) -> Component:
        """The process of a component: `etcd`, `kube-apiserver` or `kube-controller-manager`."""
        found = self.table.get(name)
        if found is None:
            raise ClusterError(f"no component {name!r} in {self.directory}: expected one of {', '.join(COMPONENTS)}")
        return found

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a component. After SIGSTOP it keeps its sockets and answers nothing."""
        if not self.component(name).signal(number):
            raise ClusterError(f"{name} of {self.directory} is not running")

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.component(name).end(grace=0)

    def restart(self, name: str) -> None:
        """Start a component again (killed first when it still runs) with the same ports and data."""
        self.component(name).end(grace=0)
        self._launch(name)
        if name != "kube-controller-manager":
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the API server's /readyz answers 200."""
        self._wait(lambda: self.api.ok("/readyz"), "the API server")

    # -- internal --------------------------------------------------------------------------------------------------

    def _launch(self, name: str) -> None:
        arguments = {"etcd": etcd_args, "kube-apiserver": apiserver_args, "kube-controller-manager": controller_manager_args}
        more = list(self._api_server_flags) if name == "kube-apiserver" else []
        if name == "kube-apiserver" and self._audited:
            more += audit_args(self.directory, self.audit_log, self._audited)
        self.table.start(name, [str(self._binaries.path(name)), *arguments[name](self.layout), *more])

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        dead: list[Component] = []

        def done() -> bool:
            dead[:] = [component for component in self.table.all() if not component.alive()]
            return bool(dead) or condition()

        in_time = poll(done, _START_SECONDS, 0.1)
        if dead:
            raise ClusterError(f"{dead[0].name} ended; last lines of {dead[0].log}:\n{dead[0].tail()}")
        if not in_time:
            logs = os.linesep.join(f"{component.name}: {component.tail(3)}" for component in self.table.all())
            raise ClusterError(f"{what} of {self.directory} was not ready after {_START_SECONDS:.0f} s:\n{logs}")
