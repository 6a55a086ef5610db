"""Proxy variables in the environment of pods: whatever stays in the cluster goes past the proxy. Real masters, stores, clients, etcd."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from epochkv_connector.store.connection import prepare_environment
from epochkv_operator.planning.connection import cluster_of, connection
from hack.cluster.binaries import build
from hack.loopback import port_open
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.support.planning import CONTEXT, pool
from tests.support.pods import Etcd, rendered, start
from tests.support.proxy import RecordingProxy
from tests.support.store import settings

MASTER, STORE = (f"127.14.{os.getpid() % 250 + 1}.{number}" for number in (1, 2))
RPC_PORT = 50051
CLIENT = """
import os, subprocess, sys
from epochkv_connector.store.client import StoreClient
from tests.support.store import settings

client = StoreClient(settings(sys.argv[1]), [])
client.start()
proxies = {os.environ["HTTPS_PROXY"], subprocess.check_output("echo $HTTPS_PROXY", shell=True, text=True).strip()}
print("ready", client.wait_ready(40), *proxies, flush=True)
client.close(10)
"""


@pytest.fixture
def address() -> str:
    """Of this machine, and not of its loopback, for which the library that asks proxies never asks one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.1", 9))
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("known", [[], ["example.com"], ["example.com", "example.org"]])
@pytest.mark.parametrize(
    "server", ["http://meta:8080/metadata", "http://meta/metadata", "http://me:secret@meta:8080", "meta:1;http://[::1/m"]
)
def test_a_metadata_server_is_reached_past_the_proxy(known: list[str], server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", known[0] if known else "")
    monkeypatch.setenv("NO_PROXY", known[-1] if known else "")
    for _ in range(2):
        prepare_environment(settings("mooncake:50051", metadata_server=server))
    assert {os.environ["NO_PROXY"], os.environ["no_proxy"]} == {",".join([*known, "meta"])}
    prepare_environment(settings("mooncake:50051", metadata_server="etcd://[fd00::1]:2379;e1:2379"))
    assert os.environ["no_proxy"].endswith("meta,fd00::1,e1")


def test_masters_stores_and_engines_reach_etcd_past_the_proxy(address: str, tmp_path: Path) -> None:
    with RecordingProxy() as proxy, Etcd(build().path("etcd"), tmp_path, address) as etcd:
        high = {"highAvailability": {"backend": "Etcd", "etcd": {"endpoints": [etcd.endpoint]}}}
        spec = {"distributed": {"mooncake": {"master": high, "store": {"segmentSize": "64Mi"}}}}
        running: list[Process] = []
        try:
            # That there is something to go past: the same master, without the line of its command.
            obedient = rendered(spec, "master")
            shell, dash_c, line, name = obedient["command"]
            obedient["command"] = [shell, dash_c, "; ".join(part for part in line.split("; ") if not part.startswith("unset ")), name]
            running.append(start(obedient, "obedient", MASTER, tmp_path, 0, **proxy.environ))
            eventually(lambda: proxy.asked, "a master that asks the proxy for etcd", 30)
            assert {asked.split()[:2][1] for asked in proxy.asked} == {etcd.endpoint}
            running.pop().end(3.0)
            proxy.asked.clear()

            running.append(start(rendered(spec, "master"), "master", MASTER, tmp_path, 0, **proxy.environ))
            eventually(lambda: port_open(RPC_PORT, MASTER), "a leader, which alone opens this port", 40)
            running.append(start(rendered(spec, "store"), "store", STORE, tmp_path, 0, **proxy.environ))
            running[-1].wait_until(lambda: "bytes of filled memory" in running[-1].log.read_text(errors="replace"), 60, "mounted")
            wanted = pool(spec)
            environ = {**os.environ, "MC_STORE_CLUSTER_ID": cluster_of(wanted) or "", **proxy.environ, "PYTHONPATH": os.getcwd()}
            master = connection(wanted, CONTEXT)["distributed"]["master_address"]
            assert master == f"etcd://{etcd.endpoint}"
            ran = subprocess.run(
                [sys.executable, "-c", CLIENT, master], env=environ, capture_output=True, text=True, timeout=90, check=False
            )
            said = f"ready True {proxy.url}"  # which the model's download may need
            assert ran.stdout.splitlines()[-1:] == [said], ran.stdout + ran.stderr[-3000:]
            assert proxy.asked == []
        finally:
            for process in running:
                process.end(3.0)
