"""What verl loads in every process that imports it (`verl.plugins`): its driver checks and expands the block, before Ray is started.

After the driver, the configuration has vLLM's `kv_transfer_config` and no block, so no other process needs this. A program that
builds a `RolloutConfig` without verl's driver gets the same from its constructor. Where this plugin is not loaded, that
constructor refuses the block: verl logs a plugin that fails at DEBUG only, so we say it louder. Knows of verl 0.9:
`validate_config`, `RolloutConfig`.
"""

import functools
import logging
from typing import Any, Final

from epochkv_connector.verl.kv_store import TRANSFER, resolve

logger = logging.getLogger(__name__)

BLOCK: Final = "kv_store"
ROLLOUT: Final = "actor_rollout_ref.rollout"


def install() -> None:
    """Wrap what a driver calls, and the class that configurations become. A second call changes nothing."""
    import verl.utils
    import verl.utils.config
    from verl.workers.config import RolloutConfig

    validate, construct = verl.utils.config.validate_config, RolloutConfig.__init__
    if hasattr(validate, "__wrapped__"):
        return

    @functools.wraps(validate)
    def validate_config(*args: Any, **kwargs: Any) -> Any:
        expand_in(kwargs["config"] if "config" in kwargs else args[0])
        return validate(*args, **kwargs)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, kv_store: Any = None, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        transfer = None if kv_store is None else resolve(kv_store, self)
        if transfer is not None:
            engine = dict(self.engine_kwargs)
            self.engine_kwargs = {**engine, "vllm": {**(engine.get("vllm") or {}), TRANSFER: transfer}}

    verl.utils.config.validate_config = verl.utils.validate_config = validate_config
    RolloutConfig.__init__ = __init__


def expand_in(config: Any) -> None:
    """Put `kv_transfer_config` in the place of the block, if verl's whole configuration has one. Raises as `resolve`: the training must
    not begin."""
    from omegaconf import OmegaConf, open_dict

    rollout = OmegaConf.select(config, ROLLOUT)
    if rollout is None or BLOCK not in rollout:
        return
    transfer = resolve(rollout[BLOCK], rollout)
    with open_dict(rollout):
        rollout.pop(BLOCK)
    if transfer is not None:
        OmegaConf.update(config, f"{ROLLOUT}.engine_kwargs.vllm.{TRANSFER}", transfer, force_add=True)


try:
    install()
except Exception:
    logger.exception("EpochKV: verl's block %s cannot be used: its plugin does not fit this verl", BLOCK)
    raise
