"""`epochkv warm`: its file, and what it makes of an engine's answers."""

import http.server
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_fence.cli.warm import prompts_of
from epochkv_fence.client import ArgumentError, ConfigurationError, Warmed, WarmFailed, warm
from epochkv_fence.client.warm import ASKED, LOOKED
from hack.waiting import eventually
from tests.support.cli import inside

NONE = "[true]", '""', '{"messages": ["a"]}'
MADE = [{"from_token": 0, "weights": "ab" * 16}]


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM's server with our connector; L2 holds 64 tokens more with each question."""

    asked: Counter[str]
    storable: int
    has_connector: bool
    away: int  # for so many questions; half of them end as aborted
    has_room: bool  # for what it held before

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "policy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert [body.pop(name) for name in ("model", "max_tokens", "temperature", "detokenize")] == ["policy", 1, 0, False]
        wanted = body.pop("kv_transfer_params")
        assert wanted in (ASKED, LOOKED)
        if type(self).away:
            type(self).away -= 1
            aborted = {"usage": {"prompt_tokens": 130}, "choices": [{"finish_reason": "abort"}]}
            return self._answer(aborted) if type(self).away % 2 else self.send_error(503)
        key = f"{self.path} {json.dumps(body)}"
        self.asked[key] += 1
        stored = min(self.storable, 64 * self.asked[key] - 64) * (self.has_room or wanted == ASKED)
        cached = {"gpu": stored, "l1": 0, "l2": 0}
        said = {"tokens": MADE, "cached_tokens": cached, "stored_tokens": stored, "storable_tokens": self.storable}
        params = {"epochkv": said} if self.has_connector else None
        self._answer({"usage": {"prompt_tokens": 130}, "kv_transfer_params": params, "choices": [{"finish_reason": "length"}]})

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
    handler = type("One", (Engine,), {"asked": Counter(), "storable": 128, "has_connector": True, "away": 0, "has_room": True})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield handler, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_it_asks_again_until_l2_holds_all(engine: tuple[type[Engine], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from a file\n")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    done: list[int] = []
    engine[0].away = 4
    assert warm(["a", [1, 2, 3]], f"{engine[1]}v1/", progress=done.append) == Warmed(2, 256, 260, "ab" * 16)
    assert engine[0].asked == {'/v1/completions {"prompt": "a"}': 4, '/v1/completions {"prompt": [1, 2, 3]}': 4}
    assert done == [1, 2, 2, 2]


class Llm:
    """As vLLM's, which has all of a prompt in L2, and 100 tokens cached, once it was saved under the names of its epoch, or adapter."""

    def __init__(self, what: str, values: Iterator[int]) -> None:
        self.asked, self.saved, self.what, self.values = list[Any](), list[Any](), what, values

    def get_default_sampling_params(self) -> Any:
        return SimpleNamespace(max_tokens=16, temperature=1.0)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert (params.max_tokens, params.temperature, use_tqdm) == (1, 0.0, False)
        value = next(self.values)
        again = (prompts[0], value) in self.saved
        self.asked.append(prompts[0])
        self.saved += [(prompts[0], value)] * (params.extra_args["kv_transfer_params"] == ASKED)
        said = {"tokens": MADE, "epoch": 0, "cached_tokens": {"gpu": 100 * again}, "stored_tokens": 128 * again, "storable_tokens": 128}
        said |= {"epoch": value} if self.what == "epoch" else {"tokens": [{**MADE[-1], "adapter": f"{value:032x}"}]}
        ended = [SimpleNamespace(finish_reason="length")]
        return [SimpleNamespace(prompt_token_ids=[0] * 130, kv_transfer_params={"epochkv": said}, outputs=ended)]


@pytest.mark.parametrize("what", ["epoch", "adapter"])
@pytest.mark.parametrize(("before", "asked"), [(2, "aabbaaab"), (4, "aabbabaabbab")], ids=["between two prompts", "in the last look"])
def test_an_engine_in_this_process_whose_names_change(what: str, before: int, asked: str) -> None:
    llm = Llm(what, itertools.chain([0] * before, itertools.repeat(1)))
    assert warm(["a", "b"], llm) == Warmed(2, 256, 260 + 65 * before, "ab" * 16)
    assert "".join(llm.asked) == asked
    with pytest.raises(WarmFailed, match="the time is over"):
        warm(["a", "b"], Llm(what, (number // 2 for number in itertools.count())), timeout_s=2.0)


@pytest.mark.parametrize(("storable", "says"), [(1 << 20, "tokens of prompt 1, and the"), (0, "the engine has no L2")])
def test_an_engine_that_never_gets_there(engine: tuple[type[Engine], str], storable: int, says: str) -> None:
    engine[0].storable = storable
    with pytest.raises(WarmFailed, match=says):
        warm(["a"], engine[1], timeout_s=0.5)


def test_what_l2_has_no_more_at_the_end_is_not_said_to_be_there(engine: tuple[type[Engine], str]) -> None:
    engine[0].has_room = False
    with pytest.raises(WarmFailed, match="L2 holds 0 of 128 tokens of prompt 1, and it held all: it has no room"):
        warm(["a", "b"], engine[1], timeout_s=1.5)


def test_who_is_interrupted_does_not_wait_for_the_others_which_are_asked_no_more(engine: tuple[type[Engine], str]) -> None:
    engine[0].storable = 1 << 20
    engine[0].asked['/v1/completions {"prompt": "a"}'] = 1 << 15  # L2 holds this one alone

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        warm("abcdefghij", engine[1], progress=interrupt, timeout_s=60.0)
    eventually(lambda: not any(thread.name == "epochkv-warm" for thread in threading.enumerate()))
    assert time.monotonic() < began + 40


def trickle(handler: Engine) -> None:
    for _ in range(60):
        handler.wfile.write(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(("verb", "path"), [("do_GET", "/v1/models"), ("do_POST", "/v1/completions")])
@pytest.mark.parametrize(("does", "says"), [(lambda self: self._answer({"data": []}), "no OpenAI server"), (trickle, "no answer in time")])
def test_an_answer_that_lacks_what_it_is_asked_for_or_its_end(
    engine: tuple[type[Engine], str], verb: str, path: str, does: Any, says: str
) -> None:
    setattr(engine[0], verb, does)
    with pytest.raises(WarmFailed, match=f"{path}: .*{says}"):
        warm(["a"], engine[1], timeout_s=1.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://a b:1", "engine", ""])
def test_nobody_is_there(url: str) -> None:
    with pytest.raises(WarmFailed, match=f"{url}/v1/models"):
        warm(["a"], url, timeout_s=2.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0, -1])
def test_a_time_that_cannot_be_meant(engine: tuple[type[Engine], str], seconds: float) -> None:
    with pytest.raises(ArgumentError, match="timeout_s is"):
        warm(["a"], engine[1], timeout_s=seconds)


def test_the_command(engine: tuple[type[Engine], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = '"one\u2028\x85"\r', "", "[1, 2]", '{"prompt": "three", "id": 3}', '{"messages": [{"role": "system"}], "cache_salt": "s"}'
    file.write_text("\n".join(lines), encoding="utf-8-sig")
    command = "warm", "--prompts", str(file), "--url", engine[1]
    status, line, _ = inside(capsys, *command)
    assert (status, line) == (0, "L2 holds 512 tokens of 4 prompts under weights abababab; 520 tokens were computed\n")
    assert list(engine[0].asked.values()) == [4] * 4
    assert set(engine[0].asked) == {
        *(f"/v1/completions {json.dumps({'prompt': prompt})}" for prompt in ("one\u2028\x85", [1, 2], "three")),
        '/v1/chat/completions {"messages": [{"role": "system"}], "cache_salt": "s"}',
    }
    engine[0].has_connector = False
    status, line, error = inside(capsys, *command)
    assert (status, line) == (1, "")
    assert "without the connector" in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [("one", "line 1: 'one' is no"), ('"a"\n[1, "b"]', "line 2"), *((one, "line 1") for one in NONE), ("\n", "has no prompt")],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=expected):
        prompts_of(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        prompts_of(tmp_path / "none")
