"""vLLM's own parser judges the arguments that the builder renders and the patterns that keep users from giving ours.

vLLM takes unambiguous abbreviations and reads '_' as '-', so a pattern can be too narrow as well as too wide.
"""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from epochkv_operator.api.engine import BLANK_ARG, FORBIDDEN_ARG, OWNED_ARG, SECRET_ARG
from epochkv_operator.planning.engine import desired_engine
from tests.support.planning import CONTEXT, ENGINE_SPECS, containers, engine, one, pool
from tests.support.scheduler_config import MODEL_CONFIG

FORBIDDEN = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend", "--config")
SECRET = ("--api-key", "--hf-token")
OWNED = (
    *("--model", "--revision", "--host", "--port", "--uds", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
    *("--enable-expert-parallel", "--no-enable-expert-parallel", "-ep", "-dp", *(f"-dp{letter}" for letter in "abehlmnpr")),
    *(f"--data-parallel-{name}" for name in ("size", "size-local", "rank", "start-rank", "address", "rpc-port", "backend")),
    *("--data-parallel-multi-port-external-lb", "--data-parallel-supervisor-port"),
    *(f"--{no}data-parallel-{who}-lb" for no in ("", "no-") for who in ("hybrid", "external")),
)


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


def group(parser: argparse.ArgumentParser, spec: dict[str, Any]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """What vLLM reads in the first and the second pod of a group, with the variables as Kubernetes and LeaderWorkerSet set them."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    context = replace(CONTEXT, served=frozenset({"LeaderWorkerSet"}))
    made = one(desired_engine(engine(spec), pool(), context), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    variables = {"$(LWS_LEADER_ADDRESS)": "big-nodes-0.big-nodes.rl", "$(LWS_WORKER_INDEX)": "1", "$(POD_IP)": "10.0.0.7"}
    written = {role: made[role]["spec"]["containers"][0]["args"] for role in ("leaderTemplate", "workerTemplate")}
    args = {role: [variables.get(argument, argument) for argument in arguments] for role, arguments in written.items()}
    commands = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(commands.add_subparsers(dest="subparser"))
    return parser.parse_args(args["leaderTemplate"]), commands.parse_args(args["workerTemplate"])


def test_vllm_parses_the_pods_of_a_group(parser: argparse.ArgumentParser) -> None:
    shape = {"parallelism": {"tensor": 4, "pipeline": 2, "nodes": 2}, "args": ["--served-model-name", "a", "b", "--enforce-eager"]}
    leader, follower = group(parser, {**ENGINE_SPECS["full"], **shape})
    assert (leader.model, follower.model_tag) == ("/models/qwen", "/models/qwen")
    assert (leader.headless, follower.headless) == (False, True)
    assert (leader.node_rank, follower.node_rank) == (0, 1)
    for parsed in (leader, follower):
        assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size, parsed.nnodes) == (4, 2, 2)
        assert (parsed.master_addr, parsed.distributed_executor_backend) == ("big-nodes-0.big-nodes.rl", "mp")
        assert (parsed.data_parallel_size, parsed.data_parallel_address, parsed.enable_expert_parallel) == (1, None, False)
        assert (parsed.served_model_name, parsed.enforce_eager, parsed.revision) == (["a", "b"], True, "abc123")
        assert parsed.kv_transfer_config.kv_connector == "EpochKVConnector"


@pytest.mark.skipif(current_platform.is_unspecified(), reason="this vLLM was built for other machines: it configures no engine")
def test_vllm_gives_each_pod_of_a_group_its_data_parallel_ranks(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    """The first pod's front end listens at its own address, and all others ask there."""
    from vllm import AsyncEngineArgs

    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**MODEL_CONFIG, "architectures": ["Qwen3MoeForCausalLM"], **experts}))
    model = {"name": "m", "source": str(tmp_path)}
    spec = {"model": model, "parallelism": {"tensor": 2, "data": 4, "expert": True, "nodes": 2}, "args": ["--skip-tokenizer-init"]}
    leader, follower = group(parser, spec)
    follower.model = follower.model_tag  # as `vllm serve` does
    whole = [AsyncEngineArgs.from_cli_args(parsed).create_engine_config(headless=parsed.headless) for parsed in (leader, follower)]
    made = [config.parallel_config for config in whole]
    for config in made:
        assert (config.data_parallel_size, config.data_parallel_size_local, config.nnodes_within_dp) == (4, 2, 1)
        assert (config.data_parallel_external_lb, config.data_parallel_hybrid_lb) == (False, False)
        assert config.enable_expert_parallel
        assert config.distributed_executor_backend == "mp"
    assert [config.data_parallel_rank for config in made] == [0, 2]
    assert [config.data_parallel_master_ip for config in made] == ["10.0.0.7", "big-nodes-0.big-nodes.rl"]


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
    for option in options(parser) - set(FORBIDDEN) - set(OWNED) - set(SECRET):
        for form in (option, f"{option}=x"):
            for pattern in (FORBIDDEN_ARG, OWNED_ARG, SECRET_ARG, BLANK_ARG):
                assert not re.search(pattern, form), form


def test_every_secret_of_the_parser_is_known(parser: argparse.ArgumentParser) -> None:
    """An option that a later vLLM adds, and that sounds like a secret, has to be looked at."""
    harmless = {"--ssl-keyfile"}  # a path
    sounds = {option for option in options(parser) if re.search("key|passw|secret|credential|(^|-)token$", option)}
    assert {one for one in sounds if not one.startswith(("--allow-", "--no-allow-"))} - harmless == set(SECRET)
