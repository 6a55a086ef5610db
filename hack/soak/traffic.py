"""Requests of a soak, and the verdict on each answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path

from hack.engine_api import EngineError
from hack.soak.answers import MAX_TOKENS, Prompt
from hack.soak.tally import Tally
from hack.soak.world import Rank

BOOT_PAUSE_SECONDS = 0.5


class Client:
    """A thread that asks one engine, one request after the other.

    An answer is judged when the engine had one set of weights, and was one process, from the question to the answer.
    While one of `ranks` boots, which takes 20 s of a core, it asks less: no update is possible meanwhile, so little would be hit.
    """

    def __init__(
        self, rank: Rank, ranks: Sequence[Rank], prompts: Sequence[Prompt], tally: Tally, seed: int, number: int, stop: threading.Event
    ) -> None:
        self._rank, self._ranks, self._prompts, self._tally, self._stop = rank, ranks, prompts, tally, stop
        self._rng = random.Random(f"{seed}:client{number}")
        self._thread = threading.Thread(target=self._run, name=f"soak-client{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for the last answer; False if there is none in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not ask(self._rank, self._rng.choice(self._prompts), self._tally):
                    self._stop.wait(0.1)
                if not all(rank.up for rank in self._ranks):
                    self._stop.wait(BOOT_PAUSE_SECONDS)
            except Exception as error:
                self._tally.problem("broken client", engine=self._rank.name, error=repr(error))
                self._stop.wait(1.0)


def ask(rank: Rank, prompt: Prompt, tally: Tally) -> bool:
    """One request and its verdict; False if the engine is away."""
    version, engine, weights = rank.version, rank.engine, rank.weights
    if weights is None or not rank.up or version % 2 or rank.version != version:
        return False
    body = {
        "model": engine.model, "prompt": list(prompt.tokens), "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    try:
        reply = engine.post("/v1/completions", body, 120.0)
    except EngineError as error:
        if rank.version == version and rank.up:
            tally.problem("failed requests", engine=rank.name, error=error)
        else:
            tally.count("requests lost with their engine")
        return False
    choice = reply["choices"][0]
    tally.count("prompts")
    if choice["finish_reason"] == "abort":
        tally.count("aborted by a pause")
    elif rank.version != version:
        tally.count("overlapped a push")
    else:
        _judge(tuple(choice["token_ids"]), prompt, weights, engine.name, reply, tally)
    return True


def _judge(tokens: tuple[int, ...], prompt: Prompt, weights: Path, engine: str, reply: dict[str, object], tally: Tally) -> None:
    usage = reply["usage"]
    assert isinstance(usage, dict)
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    tally.count("judged")
    tally.count("answers with a hit", int(cached > 0))
    expected = prompt.answers[weights]
    wrong = sum(got != want for got, want in zip(tokens, expected, strict=False)) + abs(len(tokens) - len(expected))
    if wrong:
        tally.count("wrong tokens", wrong)
        of = [folder.name for folder, answer in prompt.answers.items() if answer == tokens]
        tally.problem(
            "wrong answers", engine=engine, weights=weights.name, cached=cached, prompt=len(prompt.tokens),
            got=tokens, expected=expected, answer_of=of,
        )  # fmt: skip
