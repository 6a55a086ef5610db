"""What `make demo` stands on: programs and images that are built again when they have to, addresses, kind, and processes that end."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from hack.cluster import binaries, config
from hack.cluster.kind import AGREE, KindCluster
from hack.cluster.process import ProcessTable, start_time
from hack.cluster.provider import ClusterError
from hack.images import recipe
from hack.waiting import poll


def test_no_manifest_sets_the_epoch_and_the_demos_reference_is_its_engine_without_a_cache() -> None:
    files = {
        path: [obj["spec"] for obj in yaml.safe_load_all(path.read_text()) if obj and "spec" in obj]
        for path in Path("config").glob("*/*.yaml")
    }
    assert all("resetEpoch" not in spec for specs in files.values() for spec in specs)
    (engine,), (reference,) = (files[Path(f"config/demo/{name}.yaml")] for name in ("engine", "reference"))
    same = ("model", "image", "env", "resources", "template")
    assert {key: engine[key] for key in same} == {key: reference[key] for key in same}
    assert ([*engine["args"], "--no-enable-prefix-caching"], "poolRef" in reference) == (reference["args"], False)


def test_a_demo_does_not_wait_for_what_only_tests_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(module: binaries.Module, folder: Path, report: object) -> None:
        folder.mkdir(parents=True)
        for name in module.programs:
            (folder / name).touch()

    monkeypatch.setattr(binaries, "_build_module", build)
    found = binaries.build(lambda line: None, tmp_path)
    assert found.path("kubectl").name == "kubectl"
    with pytest.raises(ClusterError, match=r"promtool is not built: run 'python -m hack\.cluster build"):
        found.path("promtool")
    assert binaries.build(lambda line: None, tmp_path, also=["prometheus"]).path("promtool").name == "promtool"


# ------------------------------------------------------------------------------------------------------------ images
@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/x.Dockerfile").write_text("FROM a\nCOPY src src\n")
    (tmp_path / "src/__pycache__").mkdir(parents=True)
    (tmp_path / "src/a.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    return tmp_path


def test_key_follows_what_is_copied_and_nothing_else(tree: Path) -> None:
    image = recipe.Image("x", "docker/x.Dockerfile", None, 1)
    before = recipe.image_key(image, "x86_64", tree)
    (tree / "other.py").write_text("2")
    (tree / "src/__pycache__/a.cpython-311.pyc").write_bytes(b"bytecode")
    assert recipe.image_key(image, "x86_64", tree) == before
    (tree / "src/a.py").write_text("2")
    changed = recipe.image_key(image, "x86_64", tree)
    (tree / "src/a.py").write_text("1")
    (tree / "src/b.py").write_text("")
    added = recipe.image_key(image, "x86_64", tree)
    (tree / "src/b.py").unlink()
    (tree / "docker/x.Dockerfile").write_text("FROM a\nCOPY src src\nUSER 1\n")
    recipe_changed = recipe.image_key(image, "x86_64", tree)
    changes = {"target": "t"}, {"contexts": {"more": tree / "programs-0123"}}, {"arguments": {"FILE": "a.tar"}}
    keys = [recipe.image_key(replace(image, **change), "x86_64", tree) for change in changes]
    assert len({before, changed, added, recipe_changed, *keys, recipe.image_key(image, "aarch64", tree)}) == 8


# --------------------------------------------------------------------------------------------------------- addresses
def test_index_avoids_clusters_and_routes() -> None:
    routes = "default via 192.0.2.1 dev eth0\n10.103.0.0/16 dev vpn0 scope link\n"
    assert config.free_index(set(), "") == 0
    assert config.free_index({0}, routes) == 2  # 1 would use 10.102 and 10.103
    assert config.free_index({0, 2}, routes) == 3
    with pytest.raises(ClusterError, match="taken"):
        config.free_index(set(range(config.MAX_CLUSTERS)), "")


# -------------------------------------------------------------------------------------------------------------- kind
def test_no_daemon_is_started_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHKV_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("EPOCHKV_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.delenv(AGREE, raising=False)
    with pytest.raises(ClusterError, match=f"no Docker daemon answers.*{AGREE}=start.*CLUSTER=local"):
        KindCluster("none").up(print)
    assert KindCluster("none").status() == []
    KindCluster("none").down(print)
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------- processes
def test_a_reused_pid_is_not_ours(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        started = start_time(stranger.pid)
        assert started is not None
        table = ProcessTable(tmp_path)
        own = table.start("own", ["sleep", "0.2"])
        assert poll(lambda: not own.alive(), 10)
        impostor = replace(own, pid=stranger.pid, start=started - 1)
        assert not impostor.alive()
        assert impostor.signal(signal.SIGKILL) is False
        impostor.end()
        assert stranger.poll() is None
        stranger.kill()


def gone(group: int) -> bool:
    """Nobody is left of the group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


PROGRAM = """
import sys, threading, time
from pathlib import Path
from hack.standalone.process import Process, ProcessError, nothing_left

def child() -> Process:
    process = Process("child", ["sleep", "60"], Path(sys.argv[1]))
    print("started", process.popen.pid, flush=True)
    return process

def mend(process: Process) -> None:
    try:
        while True:
            process.popen.wait()
            process = child()
    except ProcessError as error:
        print(error, flush=True)

with nothing_left(lambda text: print(text, flush=True)):
    child()
    threading.Thread(target=mend, args=[child()], daemon=True).start()
    print("up", flush=True)
    if sys.argv[2] == "fails":
        raise RuntimeError("of its own")
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "fails"])
def test_nothing_of_a_program_is_left_whatever_ends_it(tmp_path: Path, how: signal.Signals | str) -> None:
    """Signalled twice, while a thread starts again what ends."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), str(how)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout
        lines = []
        while "up" not in lines:
            lines.append(program.stdout.readline().strip())
        if isinstance(how, signal.Signals):
            program.send_signal(how)
            program.send_signal(how)
        rest, _ = program.communicate(timeout=60)
    lines += rest.splitlines()
    assert program.returncode == (128 + how if isinstance(how, signal.Signals) else 1)
    assert (f"{how.name}: ending what was started" in lines) if isinstance(how, signal.Signals) else True
    assert "child is not started: everything ends" in lines
    groups = [int(line.split()[1]) for line in lines if line.startswith("started")]
    assert len(groups) >= 2
    assert all(poll(partial(gone, group), 30) for group in groups), "init takes note of who was killed"
