"""Which weights made which token of an answer: what engines put into `kv_transfer_params.epochkv` of an answer that asks for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from epochkv_fence.protocol.messages import STAMP_KEY, UNKNOWN_WEIGHTS
from epochkv_fence.protocol.pool import is_called

ASK: Final[dict[str, Any]] = {STAMP_KEY: {"stamp": True}}
"""`kv_transfer_params` of a request that asks for a stamp."""


@dataclass(frozen=True, slots=True)
class Made:
    """Tokens from `from_token` on, up to those of the next entry.

    Attributes:
        from_token: index in the answer, 0 the first.
        weights: digest of what all ranks held in the step that sampled them, 32 hex digits as in `PoolStatus`; `unknown`: nobody can say.
        label: what the trainer calls these weights; empty: nothing, or the engine has not heard yet.
        adapter: digest of the adapter's tensors, 32 hex digits, or `unknown`; empty: the request used none.
    """

    from_token: int
    weights: str
    label: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Of one answer.

    Attributes:
        made: in the order of tokens; empty: there is no token.
        epoch: of the names that its prompt was looked up under; None: before the first.
        cached_tokens: prompt tokens that were not computed for it, by `gpu`, `l1`, `l2` and `other` (another connector).
    """

    made: tuple[Made, ...]
    epoch: int | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)

    def of(self, token: int) -> Made:
        """What made the token with this index, 0 the first. A stamp does not say how many tokens there are: check the index yourself.

        Raises:
            IndexError: the index is negative, or the answer has no token.
        """
        if token < 0 or not self.made:
            raise IndexError(token)
        return next(one for one in reversed(self.made) if one.from_token <= token)

    @property
    def weights(self) -> str:
        """The digest of the weights that made the whole answer; empty: they or its adapter changed, or are unknown for a part of it."""
        policies = {(one.weights, one.adapter) for one in self.made}
        return self.made[0].weights if len(policies) == 1 and UNKNOWN_WEIGHTS not in policies.pop() else ""

    def is_of(self, weights: str) -> bool:
        """Whether these weights, with one adapter or none, made every token: a label, or the first digits of a digest, 8 at least."""
        return self.weights != "" and any(is_called(one.weights, one.label, weights) for one in self.made)


def stamps(response: Any) -> list[Stamp | None]:
    """The stamps of an answer, one for each of its choices, prompt by prompt and sample by sample; None for one without.

    Args:
        response: an answer of vLLM's server as JSON, or its last streamed chunk; the same as an object of the `openai` package; or a
            `RequestOutput` of `LLM.generate`.
    """
    params = _get(response, "kv_transfer_params")
    said = params.get(STAMP_KEY) if isinstance(params, Mapping) else None
    num_choices = len(_get(response, "choices") or _get(response, "outputs") or ())
    samples = said.get("samples") if isinstance(said, Mapping) else None
    found = [_stamp(one) for one in (samples if isinstance(samples, list) else [said])]
    return found if num_choices in (0, len(found)) else [None] * num_choices  # nobody knows whose they are


def _get(response: Any, name: str) -> Any:
    return response.get(name) if isinstance(response, Mapping) else getattr(response, name, None)


def _stamp(said: Any) -> Stamp | None:
    try:
        made = tuple(msgspec.convert(one, Made) for one in said["tokens"])
        return Stamp(made, said.get("epoch"), dict(said.get("cached_tokens") or {}))
    except (LookupError, TypeError, ValueError):
        return None
