"""GRPO runs of real TRL against real servers: without any cache once, for everybody."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hack.standalone.engine import Engine
from tests.trainers.trl import grpo, server, transport


@pytest.fixture(scope="session", autouse=True)
def wire() -> Iterator[None]:
    """Weights reach servers on a machine without a GPU, which shares its few cores with them: threads that wait would spin."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        transport.patch_trainer(patch)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grpo.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def starting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A server that caches nothing; it starts while others do."""
    engine = server.start("uncached", model, tmp_path_factory.mktemp("uncached"), None)
    yield engine
    engine.end()


@pytest.fixture(scope="session")
def uncached(starting: Engine, model: Path, tmp_path_factory: pytest.TempPathFactory) -> grpo.Run:
    starting.wait_ready(server.START_SECONDS)
    run = server.train(starting, model, tmp_path_factory.mktemp("trained"))
    assert server.hits(starting) == grpo.Hits(0, 0)
    starting.end()
    return run
