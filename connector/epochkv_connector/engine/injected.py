"""An engine that its pod's label brought the connector: nobody asked it, and it may have run without one for long.

So whatever is wrong, it stays as it is. Any Python can import this.
"""

import logging
import os
from collections.abc import Mapping
from typing import Final

INJECTED_ENV: Final = "EPOCHKV_INJECTED"
"""Set in containers that join by the label of their pod."""
_LEFT: Final = "0"


def is_injected(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(INJECTED_ENV, "") not in ("", _LEFT)


def is_left() -> bool:
    return os.environ.get(INJECTED_ENV) == _LEFT


def leave(error: BaseException) -> None:
    """Let this engine be as if its pod had not joined, in the processes that it starts, too."""
    logging.getLogger("vllm.epochkv").warning("EpochKV: this engine stays as it is: %s", error)
    os.environ.update({INJECTED_ENV: _LEFT, "EPOCHKV_ATTACH": "0", "EPOCHKV_FENCE": "0"})
