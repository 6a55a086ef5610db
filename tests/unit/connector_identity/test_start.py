"""What the user who starts an engine sees: one line, before anything is loaded. And which engines can have the fence without our connector
(`EPOCHKV_FENCE`), and the one sentence that others get.
"""

import copy
import importlib.metadata
import json
import multiprocessing
import pickle
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig, MultiModalConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from epochkv_connector.engine import describe, fenced, plugin
from epochkv_connector.engine.interface import UnsupportedEngine, running
from epochkv_connector.engine.limits import MULTI
from epochkv_fence.connection import ConfigurationError
from tests.support.scheduler_config import write_model_dir

POOL = {"name": "p", "uid": "u"}
OURS = "EpochKVConnector"


def extra(**keys: Any) -> dict[str, Any]:
    return {"pool": POOL, **keys}


def multi(*children: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}}


def child(name: str = OURS, **keys: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra(**keys)}


WRONG: dict[str, Any] = {"local": {"capacity": 1}}
DERIVED = {**multi(child(**WRONG)), "kv_connector": "PdConnector", "kv_connector_module_path": "elsewhere"}
SENTENCE = "kv_connector_extra_config: local.capacity is 1, but there is no such key"

Start = Callable[..., Any]
pytestmark = pytest.mark.skipif(current_platform.is_unspecified(), reason="this vLLM was built for other machines: it configures no engine")


@pytest.fixture
def start(configured: Callable[..., Any]) -> Start:
    """Check what vLLM would make of these arguments."""
    return lambda transfer, **parallel: plugin.check(configured(transfer, **parallel))


@pytest.mark.parametrize("transfer", [child(**WRONG), multi(child("Other"), child(**WRONG)), DERIVED])
def test_a_wrong_configuration_is_refused_before_anything_is_loaded(start: Start, transfer: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        start(transfer)
    assert str(caught.value).startswith(SENTENCE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sibling", "sentence"),
    [
        (child(), "MultiConnector holds EpochKVConnector more than once"),
        (child("NixlPushConnector"), "MultiConnector holds NixlPushConnector beside EpochKVConnector"),
        (child("MooncakeConnector"), "MultiConnector holds MooncakeConnector beside EpochKVConnector"),
        (child("MultiConnector"), "MultiConnector holds MultiConnector beside EpochKVConnector"),
        ({**child("NixlConnector"), "kv_connector_module_path": "elsewhere"}, "MultiConnector holds NixlConnector beside EpochKVConnector"),
    ],
)
def test_a_sibling_that_is_not_allowed_is_refused(start: Start, sibling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedEngine) as caught:
        start(multi(child(), child("NixlConnector"), sibling))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "transfer",
    [
        *(None, child(), child(local={"capacity_bytes": 1 << 20}), child("OffloadingConnector", **WRONG)),
        *(multi(), multi(child()), multi(child(), child("NixlConnector")), multi(child("NixlPullConnector"), child())),
        *(multi(child("A"), {}), {"kv_connector": "MultiConnector"}),
    ],
)
def test_everything_else_is_left_to_vllm(start: Start, transfer: dict[str, Any] | None) -> None:
    start(transfer)


def test_an_l1_larger_than_the_machine_is_refused_where_ranks_are_on_it(start: Start) -> None:
    large = child(local={"capacity_bytes": 1 << 50})
    for here in ({"distributed_executor_backend": "mp"}, {"distributed_executor_backend": "uni"}):
        with pytest.raises(ConfigurationError, match=r"capacity_bytes is 1125899906842624, .*lower local\.capacity_bytes, or raise that"):
            start(large, **here)
    start(large, distributed_executor_backend="ray")
    start(large, distributed_executor_backend="mp", data_parallel_size_local=0)


def test_an_l1_has_to_fit_once_for_all_ranks_of_a_machine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochkv_connector.config.memory_limit", lambda root: (1 << 30, "this test"))
    shape = {"distributed_executor_backend": "mp", "data_parallel_size": 4, "data_parallel_size_local": 2, "nnodes": 4, "world_size": 4}
    start(child(local={"capacity_bytes": 1 << 30}), **shape)
    with pytest.raises(ConfigurationError, match="which takes 1073741825 bytes"):
        start(child(local={"capacity_bytes": (1 << 30) + 1}), **shape)


def test_an_encoder_decoder_is_refused_before_it_is_loaded(start: Start, base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(base.model_config), "is_encoder_decoder", True)
    with pytest.raises(UnsupportedEngine, match="no prefixes to share"):
        start(child())


@pytest.mark.parametrize(
    ("transfer", "accepts"),
    [(child(), False), (multi(child(), {"kv_connector": "NixlConnector"}), True), ({"kv_connector": "Other"}, True)],
)
def test_media_come_as_embeddings_only_where_somebody_brings_their_kv(
    base: Any, monkeypatch: pytest.MonkeyPatch, transfer: dict[str, Any], accepts: bool
) -> None:
    """Otherwise one request with an embedding that is missing ends the engine."""
    monkeypatch.setattr(base.model_config, "multimodal_config", media := MultiModalConfig())
    monkeypatch.setattr(VllmConfig, "_resolve_mm_embedding_inputs", VllmConfig._resolve_mm_embedding_inputs)
    plugin.register()
    config = copy.copy(base)
    config.kv_transfer_config = KVTransferConfig(**{"kv_role": "kv_both", **transfer})
    config._resolve_mm_embedding_inputs()
    assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (accepts, accepts)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"tensor_parallel_size": 8}, 8),
        ({"tensor_parallel_size": 8, "nnodes": 2}, 4),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 4}, 8),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 2, "nnodes": 2}, 4),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_external_lb": True}, 2),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, 4),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4, "data_parallel_size_local": 0}, 2),  # a front end alone
    ],
)
def test_ranks_that_share_a_machine_know_how_many_they_are(base: Any, given: dict[str, Any], ranks: int, is_dense: bool) -> None:
    """vLLM has a data-parallel rank of a dense model forget the others, once its process has the configuration."""
    config = copy.copy(base)
    config.parallel_config = ParallelConfig(distributed_executor_backend="mp", **given)
    plugin.check(config)
    config.parallel_config = pickle.loads(pickle.dumps(config.parallel_config))
    if is_dense:
        config.parallel_config.reconfigure_for_independent_dp_rank()
    assert describe.ranks_here(config) == ranks


def test_ranks_that_a_launcher_starts_are_refused(start: Start) -> None:
    derived = type("Own", (ExecutorWithExternalLauncher,), {})
    for transfer, backend in ((child(), "external_launcher"), (multi(child()), "external_launcher"), (child(), derived)):
        with pytest.raises(UnsupportedEngine, match=r"backend is external_launcher with 2 ranks.*data_parallel_size 1") as caught:
            start(transfer, distributed_executor_backend=backend, world_size=2)  # so vLLM counts data-parallel ranks, too
        assert "\n" not in str(caught.value)
        start(transfer, distributed_executor_backend="external_launcher", world_size=1)
        start(transfer, distributed_executor_backend="mp", world_size=2)
    start(child("OffloadingConnector"), distributed_executor_backend="external_launcher", world_size=2)


def test_tested_versions_are_taken_and_others_are_refused_in_a_sentence(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.30.0", "0.31.2", "0.32.0", "0.33.0rc1"):
        monkeypatch.setattr(vllm, "__version__", version)
        start(child())
    for version in ("0.29.9", "0.34.0", "1.32.0", "dev"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(UnsupportedEngine, match=rf"vLLM {version} is not supported: .* 0\.30 to 0\.33.*allow_untested_vllm"):
            start(child())
        start(child(allow_untested_vllm=True))


def test_commands_of_vllm_end_in_one_line(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_command(argument: str, module: str | None = None) -> None:
        spec = None if module is None else type("Spec", (), {"name": module})
        monkeypatch.setattr(sys, "argv", [argument, "serve"])
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)

    for command in (("/usr/bin/vllm",), ("/x/api_server.py", "vllm.entrypoints.openai.api_server")):
        as_command(*command)
        with pytest.raises(SystemExit, match=f"EpochKV cannot start: {SENTENCE}"):
            start(child(**WRONG))
    for program in (("/x/train.py",), ("/x/vllm", "trainer.main")):
        as_command(*program)
        with pytest.raises(ConfigurationError, match=SENTENCE):
            start(child(**WRONG))


def run(*arguments: str, cwd: Path | None = None) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stderr.strip().splitlines()


def serve(arguments: list[str], told: Path) -> None:
    """vLLM's server, in a process of its own that has vLLM already."""
    sys.stderr = told.open("w")
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def test_the_server_ends_in_one_line_before_anything_is_loaded(base: Any, tmp_path: Path) -> None:
    told, model = tmp_path / "told", ["--model", str(write_model_dir(tmp_path / "model")), "--skip-tokenizer-init", "--enforce-eager"]
    given = [*model, "--kv-transfer-config", json.dumps(child(**WRONG))]
    server = multiprocessing.get_context("fork").Process(target=serve, args=(given, told))
    server.start()
    server.join(240)
    lines = told.read_text().strip().splitlines()
    assert server.exitcode == 1, lines
    assert lines[-1].startswith(f"EpochKV cannot start: {SENTENCE}")
    assert not any(line.startswith("Traceback") for line in lines)


@pytest.mark.parametrize("module", ["connector", "engine.plugin"])
def test_a_vllm_without_the_names_we_need_is_a_sentence(tmp_path: Path, module: str) -> None:
    """Before a constructor could look at the version, an import has failed."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text('__version__ = "0.11.0"\n')
    transfer = f"N(kv_connector={OURS!r}, kv_connector_extra_config={extra()!r})"
    config = f"N(kv_transfer_config={transfer}, parallel_config=N(distributed_executor_backend='mp', data_parallel_size_local=1))"
    code = f"from types import SimpleNamespace as N; import epochkv_connector.{module} as m; m.check({config})"
    status, lines = run("-c", code, cwd=tmp_path)
    assert status == 1
    assert "vLLM 0.11.0 is not supported: EpochKV takes 0.30 to 0.33; install one of these" in lines[-1]


def test_the_versions_that_a_hub_is_told_are_those_of_the_installed_packages() -> None:
    names = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    mooncake = {version for name, version in names.items() if name.startswith("mooncake-transfer-engine")}
    assert running() == {"epochkv": names["epochkv"], "vllm": vllm.__version__, "mooncake": mooncake.pop()}


# ---------------------------------------------------------------------------------------------- the fence without our connector
CONNECTION = {"pool": {"name": "p", "uid": "u"}, "local": {"capacity_bytes": 1 << 30}}


@pytest.fixture
def fence(configured: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Start:
    """Check an engine with this connector, as vLLM's plugin does."""
    monkeypatch.setenv("EPOCHKV_FENCE", "1")
    monkeypatch.setenv("EPOCHKV_CONFIG", json.dumps(CONNECTION))

    def check(name: str | None = None, extra: dict[str, Any] | None = None, module: str | None = None) -> Any:
        given = {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra or {}}
        config = configured(None if name is None else given)
        plugin.check(config)
        return fenced.check(config)

    return check


def children(*names: str) -> dict[str, Any]:
    return {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]}


@pytest.mark.parametrize("name", [None, *sorted(fenced.KNOWN), MULTI])
def test_connectors_whose_names_are_ours_are_fenced_without_tiers(fence: Start, name: str | None) -> None:
    config = fence(name, children("NixlConnector", "OffloadingConnector") if name == MULTI else None)
    assert config.pool.uid == "u"
    assert (config.local, config.distributed) == (None, None)


@pytest.mark.parametrize("name", [*fenced.KNOWN, MULTI])
def test_every_fenced_connector_is_one_of_vllm(name: str) -> None:
    assert name in KVConnectorFactory._registry


@pytest.mark.parametrize(("name", "module"), [("ExampleConnector", None), ("Mine", "mine"), ("NixlConnector", "mine")])
def test_a_connector_whose_keys_are_not_known_is_refused(fence: Start, name: str, module: str | None) -> None:
    sentence = f"EPOCHKV_FENCE is set and the engine has {name}: .*its keys may be made of tokens alone.*unset EPOCHKV_FENCE"
    with pytest.raises(UnsupportedEngine, match=sentence) as caught:
        fence(name, module=module)
    assert "\n" not in str(caught.value)
    assert ("remove kv_connector_module_path for vLLM's own NixlConnector" in str(caught.value)) == (name == "NixlConnector")


def test_a_multiconnector_is_refused_for_what_it_holds(fence: Start) -> None:
    inner = children("ExampleConnector")
    nested = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": inner}
    for held in (*inner["connectors"], nested):
        with pytest.raises(UnsupportedEngine, match="the engine has ExampleConnector"):
            fence("MultiConnector", {"connectors": [*children("NixlConnector")["connectors"], held]})
    with pytest.raises(UnsupportedEngine, match="kv_connector_module_path is mine"):
        fence("Mine", children("OffloadingConnector"), module="mine")
    for name, key in (("OffloadingConnector", "spec_module_path"), ("MoRIIOConnector", "read_mode")):
        with pytest.raises(UnsupportedEngine, match=f"{key} is set, .*; leave it out"):
            fence(name, {key: "yes"})


@pytest.mark.parametrize("extra", [None, children("NixlConnector", "EpochKVConnector")])
def test_our_own_connector_brings_the_fence_itself(fence: Start, extra: dict[str, Any] | None) -> None:
    ours = {"pool": CONNECTION["pool"]}
    assert fence("EpochKVConnector" if extra is None else "MultiConnector", extra or ours) is None


@pytest.mark.parametrize("value", [None, " "])
def test_the_pool_has_to_be_named(fence: Start, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("EPOCHKV_CONFIG") if value is None else monkeypatch.setenv("EPOCHKV_CONFIG", value)
    with pytest.raises(ConfigurationError, match=r"EPOCHKV_FENCE is set and EPOCHKV_CONFIG is not; set it to the pool's connection\.json"):
        fence()


def test_only_one_and_zero_are_answers(fence: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHKV_FENCE", "yes")
    with pytest.raises(ConfigurationError, match=r"EPOCHKV_FENCE is 'yes'; it must be 1 .* or 0"):
        fence()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_everything_is_left_to_vllm(fence: Start, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("EPOCHKV_FENCE") if value is None else monkeypatch.setenv("EPOCHKV_FENCE", value)
    assert fence("HF3FSKVConnector") is None


def test_another_scheduler_is_refused(fence: Start, base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """Not derived from vLLM's."""

    monkeypatch.setattr(base.scheduler_config, "scheduler_cls", Other)
    with pytest.raises(UnsupportedEngine, match=r"scheduler_cls is .*Other.*, which is not derived from vLLM's Scheduler"):
        fence()
