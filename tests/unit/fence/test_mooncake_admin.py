"""The store's admin port seen as an enemy: it hangs, drips, refuses, answers nonsense. The real master is in tests/store."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from epochkv_fence.mooncake_admin import MooncakeAdmin, StoreAdminError, _Master, check_admin_url
from hack.waiting import eventually

Handler = Callable[[socket.socket, str], None]
OK = b'{"success":true,"removed_count":%d}'


@contextmanager
def server(handle: Handler) -> Iterator[str]:
    """A raw TCP server; `handle` gets each connection with the first line of its request. Yields the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopping = threading.Event()

    def serve(sock: socket.socket) -> None:
        with sock:
            try:
                line = sock.recv(65536).split(b"\r\n", 1)[0].decode()
                handle(sock, line)
            except OSError:
                pass

    def accept() -> None:
        while not stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopping.set()
        listener.close()


def answer(sock: socket.socket, body: bytes, status: str = "200 OK") -> None:
    sock.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def remove_all(*urls: str, seconds: float = 5.0) -> tuple[int, int | None]:
    return asyncio.run(MooncakeAdmin(lambda uid: list(urls), seconds).remove_all("u-1"))


def working(keys: int = 3, before: int = 5000, after: int = 1000) -> tuple[Handler, list[str]]:
    asked: list[str] = []

    def handle(sock: socket.socket, line: str) -> None:
        asked.append(line)
        if "/metrics" in line:
            wiped = any("remove_all" in seen for seen in asked)
            text = f"# TYPE master_allocated_bytes gauge\nmaster_allocated_bytes {after if wiped else before}\nmaster_allocated_bytes_x 7\n"
            answer(sock, text.encode())
        else:
            answer(sock, OK % keys)

    return handle, asked


def test_without_a_metric_the_bytes_are_unknown() -> None:
    with server(lambda sock, line: answer(sock, OK % 2 if "remove_all" in line else b"nothing")) as url:
        assert remove_all(url) == (2, None)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"success":false,"removed_count":1}', b'{"success":true,"removed_count":-1}', b"\xff\xfe"])
def test_an_answer_that_is_none_is_an_error(body: bytes) -> None:
    with (
        server(lambda sock, line: answer(sock, body)) as url,
        pytest.raises(StoreAdminError, match=r"unexpected answer .*; give the address of a Mooncake master's admin port$"),
    ):
        remove_all(url)


def test_a_standby_and_masters_that_cannot_be_reached_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochkv_fence.mooncake_admin.CONNECT_SECONDS", 0.3)
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody, silent = (f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (listener, full))
    handle, _ = working()
    with server(lambda sock, line: answer(sock, b"service plane is not active", "503 X")) as standby, server(handle) as leader:
        with full, socket.create_connection(full.getsockname()):  # the next one gets no answer
            assert remove_all(silent, standby, nobody, leader) == (3, 4000)
        with pytest.raises(StoreAdminError, match="HTTP 503: service plane is not active"):
            remove_all(standby)


@pytest.mark.parametrize("after", ["hangs up", "answers that it failed", "answers nonsense", "hangs"])
def test_a_removal_that_was_sent_and_may_still_land_is_not_another_masters(after: str) -> None:
    """The other master would say that nothing is left, while the first one is still to empty the store."""
    sent = threading.Event()
    release = threading.Event()

    def breaking(sock: socket.socket, line: str) -> None:
        if "/metrics" in line:
            answer(sock, b"master_allocated_bytes 1\n")
            return
        sent.set()
        if after == "answers that it failed":
            answer(sock, b"upstream reset", "503 X")
        elif after == "answers nonsense":
            answer(sock, b"[]")
        elif after == "hangs":
            release.wait(30)

    handle, asked = working(keys=0)
    try:
        with server(breaking) as first, server(handle) as second, pytest.raises(StoreAdminError, match=first):
            remove_all(first, second, seconds=1.0)
    finally:
        release.set()
    assert sent.is_set()
    assert asked == []


def test_what_is_not_http_is_an_error() -> None:
    with server(lambda sock, line: sock.sendall(b"garbage\r\n\r\n")) as url, pytest.raises(StoreAdminError):
        remove_all(url)


def test_a_store_without_an_address_is_an_error() -> None:
    with pytest.raises(StoreAdminError, match="no admin address is known"):
        remove_all()


def test_a_master_that_hangs_or_drips_costs_the_deadline_and_leaves_no_thread() -> None:
    release = threading.Event()

    def hang(sock: socket.socket, line: str) -> None:
        release.wait(30)

    def drip(sock: socket.socket, line: str) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not release.wait(0.05):
            sock.sendall(b"x")

    try:
        for handle in (hang, drip):
            with server(handle) as url:
                started = time.monotonic()
                with pytest.raises(StoreAdminError, match=r"no answer within 0\.3 s"):
                    remove_all(url, seconds=0.3)
                assert time.monotonic() - started < 20
                eventually(lambda: "epochkv-store-admin" not in {thread.name for thread in threading.enumerate()}, "the thread ends")
    finally:
        release.set()


def test_nothing_is_removed_after_the_deadline() -> None:
    handle, asked = working()
    with server(handle) as url, pytest.raises(StoreAdminError, match="too late"):
        _Master(url, time.monotonic()).remove_all()  # as the thread of a process that slept would go on
    assert asked == []


@pytest.mark.parametrize(
    "url", ["", "master:9003", "https://m:1", "http://m", "http://m:x", "http://m:1/path", "http://u@m:1", "http://m:1?x", "http://:1"]
)
def test_an_admin_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must look like http://host:9003"):
        check_admin_url(url)
    assert check_admin_url("http://master:9003/") == "http://master:9003"
