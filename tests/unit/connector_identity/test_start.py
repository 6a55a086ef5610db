"""What the user who starts an engine sees: one line, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epochkv_connector import compat
from epochkv_connector.plugin import check_command_line

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
    "arguments",
    [
        [],
        ["--kv-transfer-config"],
        option(transfer()),
        option(transfer(local={"capacity_bytes": 1 << 20})),
        [*option(WRONG), *option(transfer())],  # the last one counts
        option({**WRONG, "kv_connector": "OffloadingConnector"}),
        option({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [WRONG["kv_connector"], 3]}}),
        option([1]),
        option({"kv_connector": "EpochKVConnector", "kv_connector_extra_config": 3}),
        ["--kv-transfer-config", "{not json"],
        ["--kv-transfer-config", "{" * 100_000],
    ],
)
def test_everything_else_is_left_to_vllm(arguments: list[str]) -> None:
    check_command_line(arguments)


def test_an_l1_larger_than_the_machine_ends_in_one_line() -> None:
    large = option(transfer(local={"capacity_bytes": 1 << 50}))
    with pytest.raises(SystemExit, match=r"local\.capacity_bytes is 1125899906842624, .*lower local\.capacity_bytes, or raise that limit"):
        check_command_line(large)
    check_command_line([*large, "--nnodes=64"])  # ranks are elsewhere; each machine checks its share


def test_an_untested_version_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.vllm, "__version__", "0.29.0")
    with pytest.raises(SystemExit, match=r"vLLM 0\.29\.0 is not supported: .* 0\.30 to 0\.33.*allow_untested_vllm"):
        check_command_line(option(transfer()))
    check_command_line(option(transfer(allow_untested_vllm=True)))


@pytest.mark.parametrize("module", ["connector", "stats", "plugin"])
def test_a_vllm_without_the_names_we_need_is_a_sentence(tmp_path: Path, module: str) -> None:
    """Before a constructor could look at the version, an import has failed."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text('__version__ = "0.11.0"\n')
    code = f"import epochkv_connector.{module} as m; m.check_command_line({option(transfer())!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "vLLM 0.11.0 is not supported: EpochKV was tested with 0.30 to 0.33; install one of these" in last
    if module == "plugin":
        assert done.stderr.strip() == last
