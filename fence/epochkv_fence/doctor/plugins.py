"""Whether vLLM and verl would load our plugins in processes that are started from this environment.

A process that does not load a plugin runs no code of ours, so it cannot say that `EPOCHKV_ATTACH` did nothing in it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from typing import Final

from epochkv_fence import quantity
from epochkv_fence.connection import ATTACH_ENV, CAPACITY_ENV, FENCE_ENV
from epochkv_fence.doctor.finding import Finding, Say

PLUGIN: Final = "epochkv"
VLLM_GROUP: Final = "vllm.general_plugins"
VLLM_ENV: Final = "VLLM_PLUGINS"
VERL_ENV: Final = "VERL_USE_EXTERNAL_PLUGINS"
SWITCHES: Final = (ATTACH_ENV, FENCE_ENV)
VARIABLES: Final = (*SWITCHES, VLLM_ENV, VERL_ENV, CAPACITY_ENV)
"""Without any of them, there is nothing to look at."""


def installed(group: str) -> Collection[str]:
    """Names of the plugins in this environment."""
    return importlib.metadata.entry_points(group=group).names


def check_plugins(environ: Mapping[str, str], there: Callable[[str], Collection[str]] = installed) -> list[Finding]:
    """What the variables leave out."""
    say, found = Say("plugins"), []
    attach, fence, allowed, policy, size = (environ.get(name, "").strip() for name in VARIABLES)
    for name, value in zip(SWITCHES, (attach, fence), strict=True):
        if value not in ("", "0", "1"):
            found.append(say.wrong(f"{name} is {value!r}; it must be 1, or 0 for off", f"export {name}=1"))
        if value == "1" and PLUGIN not in there(VLLM_GROUP):
            found.append(say.wrong(f"{name} is 1, and the connector is not installed here", "pip install '.[connector]'   # in a clone"))
    if size and not _is_size(size):
        found.append(say.wrong(f"{CAPACITY_ENV} is {size!r}; it must be a size such as 64Gi", f"export {CAPACITY_ENV}=64Gi"))
    if VLLM_ENV in environ and PLUGIN not in environ[VLLM_ENV].split(","):
        lost = f"{ATTACH_ENV} does nothing" if attach == "1" else "its engines do not know their weights, and share nothing"
        if fence == "1":
            lost = f"{FENCE_ENV} does nothing, and engines with connectors of vLLM find KV of older weights"
        fix = f"export {VLLM_ENV}={','.join(filter(None, (*allowed.split(','), PLUGIN)))}"
        found.append(say.wrong(f"{VLLM_ENV} is {allowed!r}, so vLLM does not load {PLUGIN}: {lost}", fix))
    if VERL_ENV in environ and policy.lower() != "auto" and PLUGIN not in [name.strip() for name in policy.lower().split(",")]:
        others = [] if policy.lower() in ("", "none") else [policy]
        fix = f"export {VERL_ENV}={','.join((*others, PLUGIN))}"
        found.append(say.warning(f"{VERL_ENV} is {policy!r}, so verl does not load {PLUGIN}, and refuses the block kv_store", fix))
    return found or [say.ok("no variable keeps vLLM or verl from loading them")]


def _is_size(text: str) -> bool:
    try:
        return quantity.parse(text) > 0
    except (ValueError, ArithmeticError):
        return False
