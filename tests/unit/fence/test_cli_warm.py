"""`epochkv warm`: its file, and what it makes of an engine's answers."""

import http.server
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_fence.cli.warm import prompts_of
from epochkv_fence.client import ArgumentError, ConfigurationError, Warmed, WarmFailed, warm

MADE = [{"from_token": 0, "weights": "ab" * 16}]


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM's server with our connector; L2 holds 64 tokens more with each question."""

    asked: dict[str, int]
    storable: int
    has_connector: bool

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "policy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "policy"
        assert body["kv_transfer_params"]["epochkv"]["stored"] is True
        key = json.dumps(body["prompt"])
        self.asked[key] = self.asked.get(key, 0) + 1
        stored = min(self.storable, 64 * self.asked[key] - 64)
        cached = {"gpu": stored, "l1": 0, "l2": 0}
        said = {"tokens": MADE, "cached_tokens": cached, "stored_tokens": stored, "storable_tokens": self.storable}
        self._answer({"usage": {"prompt_tokens": 130}, "kv_transfer_params": {"epochkv": said} if self.has_connector else None})

    def _answer(self, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def engine() -> Iterator[tuple[type[Engine], str]]:
    handler = type("One", (Engine,), {"asked": {}, "storable": 128, "has_connector": True})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_it_asks_again_until_l2_holds_all(engine: tuple[type[Engine], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from a file\n")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    done: list[int] = []
    assert warm(["a", [1, 2, 3]], engine[1], progress=done.append) == Warmed(2, 256, 260, "ab" * 16)
    assert engine[0].asked == {'"a"': 3, "[1, 2, 3]": 3}
    assert done == [1, 2]


def test_an_engine_in_this_process() -> None:
    class Llm:
        """As vLLM's, which has 100 tokens of the second question cached, and all of it in L2."""

        def __init__(self) -> None:
            self.asked: list[Any] = []

        def get_default_sampling_params(self) -> Any:
            return SimpleNamespace(max_tokens=16, temperature=1.0)

        def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
            assert (params.max_tokens, params.temperature, use_tqdm) == (1, 0.0, False)
            assert params.extra_args["kv_transfer_params"]["epochkv"] == {"stamp": True, "stored": True, "save": "Prompts"}
            again = prompts[0] in self.asked
            self.asked.append(prompts[0])
            said = {"tokens": MADE, "cached_tokens": {"gpu": 100 * again}, "stored_tokens": 128 * again, "storable_tokens": 128}
            return [SimpleNamespace(prompt_token_ids=[0] * 130, kv_transfer_params={"epochkv": said})]

    llm = Llm()
    assert warm(["a", [1, 2, 3]], llm) == Warmed(2, 256, 260, "ab" * 16)
    assert llm.asked == ["a", "a", {"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [1, 2, 3]}]


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [("storable", 1 << 20, "tokens of a prompt, and"), ("storable", 0, "it has no L2"), ("has_connector", False, "without the connector")],
)
def test_an_engine_that_never_gets_there(engine: tuple[type[Engine], str], attribute: str, value: Any, says: str) -> None:
    setattr(engine[0], attribute, value)
    with pytest.raises(WarmFailed, match=says):
        warm(["a"], engine[1], timeout_s=0.5)


def test_who_is_interrupted_does_not_wait_for_answers_under_way(engine: tuple[type[Engine], str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer, over = engine[0].do_POST, threading.Event()
    monkeypatch.setattr(engine[0], "do_POST", lambda self: answer(self) if engine[0].asked.get('"a"', 0) < 3 else over.wait(30))

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        warm(["a", *"bcdefghij"], engine[1], progress=interrupt, timeout_s=20.0)
    assert time.monotonic() < began + 10
    over.set()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://a b:1", "engine", ""])
def test_nobody_is_there(url: str) -> None:
    with pytest.raises(WarmFailed, match=f"{url}/v1/models"):
        warm(["a"], url, timeout_s=2.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0, -1])
def test_a_time_that_cannot_be_meant(engine: tuple[type[Engine], str], seconds: float) -> None:
    with pytest.raises(ArgumentError, match="timeout_s is"):
        warm(["a"], engine[1], timeout_s=seconds)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one\u2028\x85"\r\n\n[1, 2]\n{"prompt": "three", "id": 3}\n', encoding="utf-8")
    assert prompts_of(file) == ["one\u2028\x85", [1, 2], "three"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("one\n", "line 1: 'one' is no"), ('"a"\n[1, "b"]\n', "line 2"), ("[true]\n", "line 1"), ('""\n', "line 1"), ("\n", "has no prompt")],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=expected):
        prompts_of(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        prompts_of(tmp_path / "none")
