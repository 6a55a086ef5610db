"""The block `kv_store` through verl itself: its Hydra configuration, its driver's checks, `RolloutConfig`, its arguments for vLLM."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import HubWorld, hub_world
from tests.trainers.verl.command_line import BLOCK, REST, checked, configured, run
from tests.trainers.verl.command_line import enabled as enabled_with


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubWorld]:
    with hub_world(tmp_path_factory.mktemp("pool") / "state") as world:
        yield world


def to_vllm(rollout: Any) -> list[str]:
    """The arguments that `vLLMHttpServer.launch_server` makes of it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    made = omega_conf_to_dataclass(rollout)
    assert type(made).__name__ == "RolloutConfig"
    return list(build_cli_args_from_config(made.engine_kwargs["vllm"]))


def ours(world: HubWorld, **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "EpochKVConnector",
        "kv_connector_module_path": "epochkv_connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"config_file": str(world.folder / "connection.json"), **more},
    }


def enabled(world: HubWorld, *more: str) -> tuple[str, ...]:
    return enabled_with(world.folder / "connection.json", *more)


def test_the_driver_puts_vllms_configuration_in_the_place_of_the_block(world: HubWorld) -> None:
    rollout = checked(*enabled(world, "extra_config.local.capacity_bytes=1048576", "on_failure=crash"))
    assert "kv_store" not in rollout, "other processes need no plugin"
    option, value = to_vllm(rollout)
    assert (option, json.loads(value)) == ("--kv_transfer_config", ours(world, local={"capacity_bytes": 1 << 20}))


def test_a_program_without_verls_driver_gets_the_same_from_rollout_config(world: HubWorld) -> None:
    rollout = configured(*enabled(world)).actor_rollout_ref.rollout
    assert "kv_store" in rollout
    assert json.loads(to_vllm(rollout)[1]) == ours(world)


def test_a_block_that_is_off_and_none_at_all_leave_verl_as_it_is() -> None:
    for overrides in ((), (f"{BLOCK}.enable=false",)):
        for rollout in (checked(*overrides), configured(*overrides).actor_rollout_ref.rollout):
            assert to_vllm(rollout) == []


def test_the_driver_as_users_start_it_ends_with_the_sentence(tmp_path: Path) -> None:
    block = (f"{BLOCK}.enable=true", f"{BLOCK}.config_path={tmp_path}/absent.json", f"hydra.run.dir={tmp_path}")
    done = run("-m", "verl.trainer.main_ppo", *REST, *block)
    assert done.returncode == 1
    assert "BlockError: rollout.kv_store: config_path: " in done.stderr
    assert "absent.json' cannot be read" in done.stderr
