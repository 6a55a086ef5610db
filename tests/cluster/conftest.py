"""A real control plane for the tests of this layer: one for each process that runs tests, ended by pid afterwards."""

import itertools
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.operator_harness import Namespace, OperatorProcess, install_crds

_numbers = itertools.count()
LOG_LINES = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows how the logs of its operators end. (What a wait is told to say was put together when it began.)"""
    report = yield
    given = getattr(item, "funcargs", {})
    logs = sorted(given["tmp_path"].glob("operator-*.log")) if "tmp_path" in given else []
    if report.failed:
        ours = [given["operator"].log_file] if isinstance(given.get("operator"), OperatorProcess) else []
        for log in [*ours, *logs]:
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            report.sections.append((f"end of {log.name}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd + kube-apiserver + kube-controller-manager on loopback. Leave it ready: undo the faults that a test makes."""
    directory: Path = tmp_path_factory.mktemp("cp")
    with ControlPlane(directory, binaries=build()) as plane:
        yield plane


@pytest.fixture(scope="session")
def plane(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with our CRDs served."""
    install_crds(control_plane)
    return control_plane


@pytest.fixture
def fresh_control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of its own for one test, for tests that break it."""
    with ControlPlane(tmp_path / "cp", binaries=build()) as plane:
        yield plane


def _topic(request: pytest.FixtureRequest) -> str:
    return request.path.stem.removeprefix("test_").removeprefix("operator_").replace("_", "-")


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> list[str]:
    """Names of namespaces for the tests of a module that use its operator."""
    tests = [item for item in request.session.items if item.path == request.path and "operator" in getattr(item, "fixturenames", ())]
    return [f"{_topic(request)}-{next(_numbers)}" for _ in tests]


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Namespace:
    """A namespace of the test's own, named after its file; one that the operator of the module serves, if the test uses it."""
    if "operator" in request.fixturenames:
        names: list[str] = request.getfixturevalue("served")
        return Namespace.create_in(plane, names.pop())
    return Namespace.create_in(plane, f"{_topic(request)}-{next(_numbers)}")


@pytest.fixture(scope="module")
def operator(
    plane: ControlPlane, served: list[str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """The module's operator. A test that breaks or restarts one takes one of its own."""
    home = Namespace.create_in(plane, f"{_topic(request)}-home-{next(_numbers)}")
    with OperatorProcess(plane, home.name, tmp_path_factory.mktemp("operator"), watch_namespace=tuple(served)) as process:
        yield process.wait_ready()


@pytest.fixture
def proxy(plane: ControlPlane, tmp_path: Path) -> Iterator[FaultProxy]:
    """A way to the API server that can be told to fail."""
    with FaultProxy(plane, tmp_path) as made:
        yield made
