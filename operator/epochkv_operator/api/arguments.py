"""Which arguments of vLLM a user may give: not the operator's own, not secrets, and each option as one item.

vLLM's parser takes unambiguous abbreviations and reads '_' as '-', so the shortest forms count too (checked on 0.32).
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from epochkv_operator.api.values import Checked

FORBIDDEN_ARG: Final = "^--(kv[-_](t|o)|config(=|$))"
_OWNED_OPTIONS: Final = "model|u(ds?)?|po?r?t?|ho?s?t?|te[a-z_-]*|rev[a-z]*|pi[a-z_-]*|nn[a-z]*|nod[a-z_-]*|mas[a-z_-]*|hea[a-z]*"
OWNED_ARG: Final = f"^(--({_OWNED_OPTIONS})(=.*)?|-(t|pp|n|r).*)$"
SECRET_ARG: Final = "^--(api[-_]k|hf[-_]t)"
BLANK_ARG: Final = r"^(\s+-|--?[a-zA-Z][-a-zA-Z0-9_.]*\s)"
EC_ARG: Final = "^--ec[-_]t"

FORBIDDEN_ARG_TEXT: Final = (
    "belongs to the operator, as do --kv-transfer-config, --kv-offloading-* and --config, also abbreviated: remove it from spec.args;"
    " the pool named by spec.poolRef decides about KV"
)
OWNED_ARG_TEXT: Final = (
    "belongs to the operator, as do --model, --revision, --tensor-parallel-size, --pipeline-parallel-size, --nnodes, --node-rank,"
    " --master-*, --headless, --host, --port and --uds: use spec.model and spec.parallelism; the port is always 8000"
)
SECRET_ARG_TEXT: Final = (
    "is a secret on a command line, for everybody to see who may read this object or list processes: remove it from spec.args, and set"
    " VLLM_API_KEY (for --api-key) or HF_TOKEN (for --hf-token) in spec.env with valueFrom.secretKeyRef"
)
SECRET_ENV: Final = ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SECRET_ENV_TEXT: Final = "is a secret, for everybody to see who may read this object: give it with valueFrom.secretKeyRef, and not as value"
BLANK_ARG_TEXT: Final = (
    "spec.args has an option and a blank in one item, which vLLM does not split: write --max-model-len=2048, or two items,"
    " instead of '--max-model-len 2048'"
)
EC_ARG_TEXT: Final = "spec.args has --ec-transfer-config: encoder outputs of other engines are not named by the weights; remove it"


def _without(pattern: str, text: str, *, since_stored: bool = False) -> Checked:
    """No argument that `pattern` finds. The message has the option's name and never its value, which may be a secret."""
    found = re.compile(pattern, re.ASCII)
    return Checked(
        f"!self.matches(r'{pattern}')",
        lambda argument: found.search(argument) is None,
        f"an option {text}",
        f"'%s {text}'.format([self.split('=')[0]])",
        lambda argument: f"{argument.split('=')[0]} {text}",
        reason="FieldValueForbidden",  # with another reason, the API server would show the value
        since_stored=since_stored,
    )


Argument = Annotated[
    str,
    Field(max_length=4096),
    _without(FORBIDDEN_ARG, FORBIDDEN_ARG_TEXT),
    _without(OWNED_ARG, OWNED_ARG_TEXT),
    _without(SECRET_ARG, SECRET_ARG_TEXT, since_stored=True),
    Checked(
        f"!self.matches(r'{BLANK_ARG}')",
        lambda argument: re.search(BLANK_ARG, argument, re.ASCII) is None,
        BLANK_ARG_TEXT,
        reason="FieldValueForbidden",
        since_stored=True,
    ),
]
"""One argument."""
