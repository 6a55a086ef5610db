"""What the user who starts an engine sees: one line, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epochkv_connector.config.keys import ConfigError
from epochkv_connector.connector import EpochKVConnector
from epochkv_connector.engine import compat
from epochkv_connector.engine.plugin import check_command_line

POOL = {"name": "p", "uid": "u"}


def transfer(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "EpochKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"pool": POOL, **extra}}


def option(value: Any) -> list[str]:
    return ["serve", "model", "--kv-transfer-config", json.dumps(value)]


WRONG = transfer(local={"capacity": 1})
SENTENCE = "EpochKV cannot start: kv_connector_extra_config: local.capacity is 1, but there is no such key"


@pytest.mark.parametrize(
    "arguments",
    [
        option(WRONG),
        [f"--kv-transfer-config={json.dumps(WRONG)}", "--port", "1"],
        ["--kv_transfer_config", json.dumps(WRONG)],
        [*option(transfer()), *option(WRONG)],
        option({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, WRONG]}}),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check_command_line(arguments)
    assert str(caught.value).startswith(SENTENCE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sibling", "sentence"),
    [
        ("EpochKVConnector", "MultiConnector holds EpochKVConnector more than once"),
        ("NixlConnector", "MultiConnector holds NixlConnector beside EpochKVConnector"),
        ("MultiConnector", "MultiConnector holds MultiConnector beside EpochKVConnector"),
    ],
)
def test_a_sibling_that_is_not_allowed_ends_in_one_line(sibling: str, sentence: str) -> None:
    children = [transfer(), {**transfer(), "kv_connector": sibling}]
    with pytest.raises(SystemExit) as caught:
        check_command_line(option({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}))
    assert str(caught.value).startswith(f"EpochKV cannot start: {sentence}")
    assert "\n" not in str(caught.value)


OPTION = "--kv-transfer-config"
DOTTED = [
    f"{OPTION}.kv_connector=EpochKVConnector",
    f"{OPTION}.kv_role",
    "kv_both",
    f"{OPTION}.kv_connector_extra_config.pool",
    json.dumps(POOL),
    "--kv_transfer_config.kv_connector_extra_config.local.capacity",
    "1",
]


def test_dotted_options_are_read_as_vllm_reads_them() -> None:
    with pytest.raises(SystemExit, match=SENTENCE):
        check_command_line(["serve", "model", *DOTTED])
    check_command_line(["serve", "model", *DOTTED[:-1], "2Gi", f"{OPTION}.kv_connector=OffloadingConnector"])  # the last one counts
    check_command_line([*DOTTED[:-2], f"{OPTION}.kv_connector_extra_config.local.capacity_bytes", "1048576"])
    check_command_line([*DOTTED, f"{OPTION}.kv_role"])  # no value: left to vLLM


@pytest.mark.parametrize("form", ["nested", "text", "dotted"])
def test_a_yaml_file_is_read_as_vllm_reads_it(tmp_path: Path, form: str) -> None:
    import yaml

    forms = {
        "nested": {"kv-transfer-config": WRONG},
        "text": {"kv_transfer_config": json.dumps(WRONG)},
        "dotted": {name.removeprefix("--"): value for name, value in zip(DOTTED[1::2], DOTTED[2::2], strict=True)},
    }
    if form == "dotted":
        forms["dotted"]["kv-transfer-config.kv_connector"] = "EpochKVConnector"
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump({"port": 8000, "enforce-eager": True, **forms[form]}))
    for arguments in (["serve", "model", "--config", str(path)], ["--model", "model", "--config", str(path)]):
        with pytest.raises(SystemExit, match=SENTENCE):
            check_command_line(arguments)
    check_command_line(["serve", "model", "--config", str(path), *option(transfer())[2:]] if form != "dotted" else [])
    check_command_line(["serve", "model", "--config", str(tmp_path / "absent.yaml")])


def test_a_python_program_is_told_before_anything_is_loaded() -> None:
    """In a process of its own, as plugins are called once in each; `EngineArgs` is what `LLM(...)` makes first."""
    code = "from vllm import EngineArgs; EngineArgs(model='absent', kv_transfer_config={!r})"
    done = subprocess.run([sys.executable, "-c", code.format(WRONG)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("epochkv_connector.config.keys.ConfigError: " + SENTENCE.partition(": ")[2])
    given = transfer(local={"capacity_bytes": 1 << 20})
    done = subprocess.run([sys.executable, "-c", code.format(given)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "named"), [(5, "5 GiB would be 5368709120"), (511, "at least 512")])
def test_an_l1_that_holds_no_block_of_any_model_is_refused_before_one_is_loaded(given: int, named: str) -> None:
    extra = {"pool": POOL, "local": {"capacity_bytes": given}}
    with pytest.raises(SystemExit, match=rf"local\.capacity_bytes is {given}; .*{named}"):
        check_command_line(option(transfer(local=extra["local"])))
    with pytest.raises(ConfigError, match=rf"local\.capacity_bytes is {given}; .*{named}"):
        EpochKVConnector.requires_piecewise_for_cudagraph(extra)


def test_vllm_asks_about_graphs_and_hears_of_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EpochKVConnector.requires_piecewise_for_cudagraph({"pool": POOL}) is False
    with pytest.raises(ConfigError, match=r"hub\.endpoint is 'http://x'; it must be an address like tcp://host:7700"):
        EpochKVConnector.requires_piecewise_for_cudagraph({"pool": POOL, "hub": {"endpoint": "http://x"}})
    monkeypatch.setattr(compat.vllm, "__version__", "0.29.0")
    with pytest.raises(compat.UnsupportedEngine, match=r"vLLM 0\.29\.0 is not supported"):
        EpochKVConnector.requires_piecewise_for_cudagraph({"pool": POOL})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--kv-transfer-config"],
        option(transfer()),
        option(transfer(local={"capacity_bytes": 1 << 20})),
        [*option(WRONG), *option(transfer())],  # the last one counts
        option({**WRONG, "kv_connector": "OffloadingConnector"}),
        option({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [WRONG["kv_connector"], 3]}}),
        option({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer()]}}),
        option({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "A"}, {}]}}),
        option([1]),
        option({"kv_connector": "EpochKVConnector", "kv_connector_extra_config": 3}),
        ["--kv-transfer-config", "{not json"],
        ["--kv-transfer-config", "{" * 100_000],
    ],
)
def test_everything_else_is_left_to_vllm(arguments: list[str]) -> None:
    check_command_line(arguments)


def test_an_l1_larger_than_the_machine_ends_in_one_line(tmp_path: Path) -> None:
    large = option(transfer(local={"capacity_bytes": 1 << 50}))
    with pytest.raises(SystemExit, match=r"local\.capacity_bytes is 1125899906842624, .*lower local\.capacity_bytes, or raise that limit"):
        check_command_line(large)
    check_command_line([*large, "--nnodes=64"])  # ranks are elsewhere; each machine checks its share
    path = tmp_path / "engine.yaml"
    path.write_text("nnodes: 64\n")
    check_command_line([*large, "--config", str(path)])


LAUNCHED = ["--distributed-executor-backend", "external_launcher"]


@pytest.mark.parametrize(
    "ranks", [["-tp", "2"], ["--tensor_parallel_size=2"], ["-tp", "1", "-pp", "2"], ["--data-parallel-size", "2"], ["-pcp=2"]]
)
def test_ranks_that_a_launcher_starts_end_in_one_line(ranks: list[str]) -> None:
    in_multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [transfer()]}}
    for given in (transfer(), in_multi):
        with pytest.raises(
            SystemExit, match="EpochKV cannot start: distributed_executor_backend is external_launcher with 2 ranks"
        ) as caught:
            check_command_line([*option(given), *LAUNCHED, *ranks])
        assert "\n" not in str(caught.value)
        check_command_line([*option(given), *LAUNCHED])
        check_command_line([*option(given), *ranks])
        check_command_line([*option(given), *LAUNCHED, *ranks, "--distributed-executor-backend=mp"])
    for other in ({"kv_connector": "OffloadingConnector"}, {**in_multi, "kv_connector_extra_config": {"connectors": 3}}, 3):
        check_command_line([*option(other), *LAUNCHED, *ranks])


def test_a_python_program_that_a_launcher_starts_is_told_before_anything_is_loaded() -> None:
    code = (
        "from vllm import EngineArgs; EngineArgs(model='absent', kv_transfer_config={!r}, "
        "distributed_executor_backend='external_launcher', tensor_parallel_size={})"
    )
    for size, said in ((2, "external_launcher with 2 ranks"), (1, "")):
        given = code.format(transfer(), size)
        done = subprocess.run([sys.executable, "-c", given], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == (1 if said else 0), done.stderr
        assert said in (done.stderr.strip().splitlines() or [""])[-1]


def test_an_untested_version_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.vllm, "__version__", "0.29.0")
    with pytest.raises(SystemExit, match=r"vLLM 0\.29\.0 is not supported: .* 0\.30 to 0\.33.*allow_untested_vllm"):
        check_command_line(option(transfer()))
    check_command_line(option(transfer(allow_untested_vllm=True)))


@pytest.mark.parametrize("module", ["connector", "metrics.stats", "engine.plugin"])
def test_a_vllm_without_the_names_we_need_is_a_sentence(tmp_path: Path, module: str) -> None:
    """Before a constructor could look at the version, an import has failed."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text('__version__ = "0.11.0"\n')
    code = f"import epochkv_connector.{module} as m; m.check_command_line({option(transfer())!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "vLLM 0.11.0 is not supported: EpochKV was tested with 0.30 to 0.33; install one of these" in last
    if module == "engine.plugin":
        assert done.stderr.strip() == last
