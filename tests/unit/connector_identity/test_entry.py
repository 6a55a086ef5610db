"""The entry point of vLLM's plugins: what an init container has left is found, and a vLLM that cannot have a connector stays as it is."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm

from epochkv_connector.engine import entry, injected, plugin

HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM's loggers may not propagate."""
    log = logging.getLogger("vllm.epochkv")
    log.addHandler(caplog.handler)
    yield
    log.removeHandler(caplog.handler)


@pytest.mark.parametrize(("version", "value", "joins"), [("0.32.0", "1", True), ("0.29.1", "1", False), ("0.29.1", "", True)])
def test_only_a_pod_that_joined_by_its_label_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, value: str, joins: bool
) -> None:
    """Whoever has installed the connector is told by an error (`limits.check_start`)."""
    registered: list[str] = []
    monkeypatch.setattr(plugin, "register", lambda: registered.append("plugin"))
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setenv(injected.INJECTED_ENV, value)
    with caplog.at_level(logging.WARNING, "vllm.epochkv"):
        entry.register()
    assert registered == (["plugin"] if joins else [])
    (*lines,) = (line for line in caplog.messages if "stays as it is" in line)
    assert len(set(lines)) == (not joins)  # two handlers may have it
    assert all("vLLM 0.29.1 is not supported: EpochKV takes 0.30 to 0.33" in line for line in lines)


def test_a_vllm_without_the_names_that_a_connector_needs_stays_as_it_is(tmp_path: Path) -> None:
    """So far away that our own module cannot be imported."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.6.3'\n")
    code = "import epochkv_connector.engine as e; from epochkv_connector.engine import entry; entry.register(); print(hasattr(e, 'plugin'))"
    environ = {"PYTHONPATH": f"{tmp_path}:{entry.BUNDLE}:{entry.BUNDLE.parent / 'fence'}", injected.INJECTED_ENV: "1", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
    assert done.stderr.count("\n") == 1
    assert "this engine stays as it is: vLLM 0.6.3 is not supported" in done.stderr


@pytest.mark.parametrize("error", [AttributeError("enum has no StrEnum"), ModuleNotFoundError("msgspec"), SystemExit("no")])
def test_no_error_of_ours_ends_a_pod(error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(plugin, "register", fail)
    for name in (injected.INJECTED_ENV, "EPOCHKV_ATTACH", "EPOCHKV_FENCE"):
        monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING, "vllm.epochkv"):
        for _ in range(2):
            entry.register()
    assert set(caplog.messages) == {f"EpochKV: this engine stays as it is: {error}"}
    assert {os.environ[name] for name in (injected.INJECTED_ENV, "EPOCHKV_ATTACH", "EPOCHKV_FENCE")} == {"0"}, "its processes, too"


def test_another_python_than_the_connector_was_brought_for_is_named(tmp_path: Path) -> None:
    entry.check_python(tmp_path)
    (tmp_path / "cp39").mkdir()
    with pytest.raises(RuntimeError, match=f"^this Python is {HERE}, and the connector was brought for cp39$"):
        entry.check_python(tmp_path)
    (tmp_path / HERE).mkdir()
    entry.check_python(tmp_path)


def test_what_was_brought_for_this_python_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for version in (HERE, "cp27"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "brought_along.py").write_text(f"FOR = '{version}'")
    monkeypatch.setattr(entry, "OF_THE_SYSTEM", ("libnowhere.so.1", "libc.so.6"))
    tried: list[str] = []
    real = ctypes.CDLL

    def load(name: str) -> ctypes.CDLL:
        tried.append(name)
        return real(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    for _ in range(2):  # vLLM calls more than once
        entry.use_bundle(tmp_path)
    import brought_along  # type: ignore[import-not-found]

    assert brought_along.FOR == HERE
    assert sys.path.count(str(tmp_path / HERE)) == 1
    assert tried == ["libnowhere.so.1", str(tmp_path / "lib/libnowhere.so.1"), "libc.so.6"]


def test_an_installed_connector_has_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    entry.use_bundle(entry.BUNDLE)
    assert sys.path == before


def test_the_mooncake_that_was_brought_counts_once_our_connector_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HERE).mkdir()
    monkeypatch.setattr(sys, "path", ["/image"])
    entry.prefer_bundle(tmp_path)
    assert sys.path == ["/image"], "nothing was brought"
    entry.use_bundle(tmp_path)
    assert sys.path == ["/image", str(tmp_path / HERE)], "vLLM's own connectors keep the image's"
    entry.prefer_bundle(tmp_path)
    assert sys.path == [str(tmp_path / HERE), "/image"]
