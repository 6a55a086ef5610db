"""vLLM's own parser judges the arguments that the builder renders and the patterns that keep users from giving ours.

vLLM takes unambiguous abbreviations and reads '_' as '-', so a pattern can be too narrow as well as too wide.
"""

from __future__ import annotations

import argparse
import json
import re

import pytest

from epochkv_operator.api.arguments import BLANK_ARG, FORBIDDEN_ARG, OWNED_ARG, SECRET_ARG
from epochkv_operator.planning.engine import desired_engine
from tests.support.planning import CONTEXT, ENGINE_SPECS, containers, engine, one, pool

FORBIDDEN = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend", "--config")
SECRET = ("--api-key", "--hf-token")
OWNED = ("--model", "--revision", "--tensor-parallel-size", "-tp", "--host", "--port", "--uds")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def options(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


@pytest.mark.parametrize("spec", ENGINE_SPECS)
def test_vllm_parses_what_is_rendered(parser: argparse.ArgumentParser, spec: str) -> None:
    wanted = engine(spec)
    deployment = one(desired_engine(wanted, None if spec == "no-pool" else pool(), CONTEXT), "Deployment")
    parsed = parser.parse_args(containers(deployment)[0]["args"])
    assert parsed.port == 8000
    assert parsed.model == (wanted.spec.model.source or wanted.spec.model.name)
    assert parsed.revision == wanted.spec.model.revision
    assert parsed.tensor_parallel_size == wanted.spec.parallelism.tensor
    assert parsed.served_model_name == (["policy"] if spec == "full" else ["tiny"])
    assert parsed.enable_prompt_tokens_details is (spec != "full")
    assert parsed.shutdown_timeout == (280 if spec == "full" else 40)
    if spec == "no-pool":
        assert parsed.kv_transfer_config is None
    else:
        assert parsed.kv_transfer_config.kv_connector == "EpochKVConnector"
        assert parsed.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_dots_in_model_paths_survive(parser: argparse.ArgumentParser) -> None:
    spec = {"model": {"name": "org/model-2.5", "source": "/models/v1.2"}, "poolRef": {"name": "policy"}}
    parsed = parser.parse_args(containers(one(desired_engine(engine(spec), pool(), CONTEXT), "Deployment"))[0]["args"])
    assert (parsed.model, parsed.served_model_name) == ("/models/v1.2", ["org/model-2.5"])


@pytest.mark.parametrize(
    ("targets", "pattern"), [(FORBIDDEN, FORBIDDEN_ARG), (OWNED, OWNED_ARG), (SECRET, SECRET_ARG)], ids=["forbidden", "owned", "secret"]
)
def test_every_spelling_that_vllm_takes_is_refused(parser: argparse.ArgumentParser, targets: tuple[str, ...], pattern: str) -> None:
    known = options(parser)
    assert set(targets) <= known
    taken = []
    for target in targets:
        for length in range(2, len(target) + 1):
            prefix = target[:length]
            matching = [option for option in known if option.startswith(prefix)]
            if prefix in known or len(matching) == 1 or set(matching) <= set(targets):
                taken.append(prefix)
    assert any({first, second} <= set(taken) for first, second in (("--kv-t", "--kv-o"), ("--te", "--rev"), ("--api-k", "--hf-t")))
    for spelling in taken:
        for form in (spelling, f"{spelling}=x", spelling[:2] + spelling[2:].replace("-", "_")):
            assert re.search(pattern, form), form


def test_nothing_else_is_refused(parser: argparse.ArgumentParser) -> None:
    """Every other option of vLLM stays usable."""
    for option in options(parser) - set(FORBIDDEN) - set(OWNED) - set(SECRET):
        for form in (option, f"{option}=x"):
            for pattern in (FORBIDDEN_ARG, OWNED_ARG, SECRET_ARG, BLANK_ARG):
                assert not re.search(pattern, form), form


def test_every_secret_of_the_parser_is_known(parser: argparse.ArgumentParser) -> None:
    """An option that a later vLLM adds, and that sounds like a secret, has to be looked at."""
    harmless = {"--ssl-keyfile"}  # a path
    sounds = {option for option in options(parser) if re.search("key|passw|secret|credential|(^|-)token$", option)}
    assert {one for one in sounds if not one.startswith(("--allow-", "--no-allow-"))} - harmless == set(SECRET)


def test_vllm_reads_the_key_from_the_environment() -> None:
    """The remedy that the refusal names."""
    from vllm import envs

    assert "VLLM_API_KEY" in envs.environment_variables


def test_values_are_not_mistaken_for_options() -> None:
    for value in ("my--kv-transfer-config", json.dumps({"--kv-transfer-config": 1}), "x-tp", "/models/--config"):
        assert not re.search(FORBIDDEN_ARG, value)
        assert not re.search(OWNED_ARG, value)
