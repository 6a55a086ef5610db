"""Pods of a pool as plain processes: the command, arguments and environment that the operator renders, on loopback addresses.

One machine stands for several, so what a pod binds on all of its addresses (`$any`, and the ports of the store's two HTTP servers)
is bound on its own address or a free port instead. Nothing else differs from the pods.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from epochkv_operator.planning.podspec import EVERY_ADDRESS
from epochkv_operator.planning.pool import desired_pool
from hack.loopback import free_port, port_open
from hack.standalone.process import Process
from tests.support.planning import CONTEXT, containers, one, pool

Json = dict[str, Any]
BIN = Path(sys.executable).parent
ADMIN_PORT = 9003


def rendered(spec: Json, component: str) -> Json:
    """The container of a component (`master`, `store`) of a pool with this spec."""
    kind = "Deployment" if component == "master" else "StatefulSet"
    return containers(one(desired_pool(pool(spec), CONTEXT), kind))[0]


def start(container: Json, name: str, address: str, directory: Path, rest_port: int = 0, **environ: str) -> Process:
    """Run a container as the pod of this address would. `rest_port` is for a store's own HTTP server; `environ` overrides what it has."""
    said = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    given = {"POD_IP": address} | {key: value.replace("$(POD_IP)", address) for key, value in said.items()}
    shell, dash_c, line, name_of_shell = container["command"]
    arguments = [argument.replace("$(POD_IP)", address) for argument in container["args"]]
    if "--port" in arguments:
        arguments[arguments.index("--port") + 1] = str(rest_port or free_port())
    http = {"MOONCAKE_CLIENT_HTTP_PORT": str(free_port())} if "MOONCAKE_CLIENT_HTTP_PORT" in given else {}
    command = [shell, dash_c, line.replace(EVERY_ADDRESS, f"any={address}"), name_of_shell, *arguments]
    return Process(name, command, directory / f"{name}.log", {"PATH": f"{BIN}:{os.environ['PATH']}"} | given | http | environ)


class Etcd:
    """One etcd member, without TLS: what the installed Mooncake can talk to. Use as a context manager."""

    def __init__(self, binary: Path, directory: Path, host: str = "127.0.0.1") -> None:
        self.host, self.port, peer = host, free_port(), free_port()
        self.endpoint = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        own, other = f"http://{self.endpoint}", f"http://127.0.0.1:{peer}"
        command = [
            str(binary), f"--data-dir={directory / 'etcd'}", f"--listen-client-urls={own}", f"--advertise-client-urls={own}",
            f"--listen-peer-urls={other}", f"--initial-advertise-peer-urls={other}", f"--initial-cluster=default={other}",
            "--unsafe-no-fsync",
        ]  # fmt: skip
        self.process = Process("etcd", command, directory / "etcd.log")

    def __enter__(self) -> Etcd:
        try:
            self.process.wait_until(lambda: port_open(self.port, self.host), 30, "accepting connections")
        except BaseException:
            self.process.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end(3.0)
