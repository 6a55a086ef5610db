"""verl's configuration as its driver gets it from a command line, and after the driver has checked it."""

import os
import subprocess
import sys
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

ROLLOUT = "actor_rollout_ref.rollout"
BLOCK = f"+{ROLLOUT}.kv_store"
REST = (f"{ROLLOUT}.name=vllm", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
"""What verl's configuration has no default for, and what its checks want of the rest."""


def enabled(config_path: object, *more: str) -> tuple[str, ...]:
    """The block with this file; `more`: keys in it and their values."""
    return (f"{BLOCK}.enable=true", f"{BLOCK}.config_path={config_path}", *(f"{BLOCK}.{one}" for one in more))


def configured(*overrides: str) -> DictConfig:
    """What verl's driver gets from this command line."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*REST, *overrides])


def checked(*overrides: str) -> Any:
    """The rollout part after verl's driver has checked its configuration as `verl.trainer.main_ppo.main` does."""
    from verl.trainer.main_ppo import validate_config  # by the name that the driver has

    config = configured(*overrides)
    try:
        validate_config(config=config, use_reference_policy=False, use_critic=False)
    except ValueError as error:  # verl's own checks, of parts that no test here sets
        if type(error) is not ValueError:
            raise
    return config.actor_rollout_ref.rollout


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A program of this environment, to its end."""
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, **environ}, capture_output=True, text=True, timeout=280, check=False
    )
