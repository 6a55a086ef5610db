"""One cluster with the demo's pool and engines for the whole layer.

`EPOCHKV_CLUSTER=NAME` uses (and keeps) that cluster, for example the one that `make demo` left; otherwise a cluster of its own is made
and removed, whose name belongs to this checkout. What a run that was killed left of it goes first.
"""

import hashlib
import os
from collections.abc import Iterator

import pytest

from hack.demo.kube import Kube
from hack.demo.setup import ROOT, Setup

OWN_CLUSTER = "e2e-" + hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]


@pytest.fixture(scope="session")
def setup() -> Iterator[Setup]:
    """Everything installed; pool, engines and reference Ready."""
    given = os.environ.get("EPOCHKV_CLUSTER")
    made = Setup(cluster=given or OWN_CLUSTER)
    try:
        if given is None:
            made.remove(print)
        archives = made.prepare(lambda text, part="": print(f"{part}: {text}"))
        made.make_models(print)
        made.bring_up(print)
        made.load_images(archives, print)
        made.install(print)
        made.apply(print)
        made.wait_ready(lambda text: None)
        yield made
    finally:
        if given is None:
            made.remove(print)


@pytest.fixture(scope="session")
def kube(setup: Setup) -> Kube:
    return setup.kube()
