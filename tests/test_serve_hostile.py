"""The server against bad requests, bad clients and bad keys: right status codes, no 500, and others are answered."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conftest import called
from serve_engine import Served, ThreadEngine, long_base, serving, wait_until
from sojourn.errors import UserError
from sojourn.infer.load import LoadedModel, load_model
from sojourn.serve.auth import ApiKey, Quota, add_key, load_keys
from sojourn.serve.errors import ApiError
from sojourn.serve.limits import Admission, Queue
from sojourn.web.address import bind, is_loopback, url_of

EVERYWHERE = "0.0.0.0"  # noqa: S104
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FOREVER = {**CHAT, "max_tokens": 900, "ignore_eos": True}
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/load_lora_adapter",
          "/v1/unload_lora_adapter", "/admin/reload")  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(long_base(tiny.base)), "cpu")


@pytest.fixture(scope="module")
def served(loaded: LoadedModel):
    with serving(ThreadEngine(loaded), max_body_bytes=300_000, header_seconds=1, body_seconds=1) as made:
        yield made
        assert not made.lines("internal_error") and not made.lines("server")


def is_fine(served: Served) -> bool:
    return served.post("/v1/chat/completions", CHAT).status_code == 200


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


BODIES = (
    b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"model": "\xff"}', b"{" * 5000, b"[" * 100_000,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": -Infinity}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny", "prompt": "hi", "input": "hi", "logit_bias": {"1": NaN}}',
    b'{"model": "tiny", "prompt": [1, "a"]}', b'{"model": "tiny", "prompt": [[]]}', b'{"model": "tiny", "prompt": ""}',
    b'{"model": "tiny", "prompt": [[99999]]}', b'{"model": "tiny", "prompt": [-1]}',
    b'{"model": "tiny", "prompt": [[[1]]]}',
    b'{"model": "\\u0000", "prompt": "hi"}', b'{"lora_name": "a", "lora_path": "\\u0000"}',
    b'{"lora_name": "a", "lora_path": "/nowhere"}', b'{"lora_name": "a", "lora_path": "../../etc"}',
    b'{"lora_name": "tiny", "lora_path": "x"}', b'{"model": "nowhere"}', b'{"model": "\\u0000x"}',
    b'{"checkpoint": "x"}', b'{"lora_name": "0", "lora_path": "' + b"0" * 4096 + b'"}',
    b'{"model": "' + b"0" * 4000 + b'"}',
)  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_a_bad_body_is_a_client_error_on_every_route(served: Served, route: str) -> None:
    for body in BODIES:
        answer = served.post(route, content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, (body[:80], answer.text)
        error_of(answer)
    assert is_fine(served)


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_that_is_no_json_is_told_so(served: Served, route: str) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/vnd.x+json",
        "",
    ):  # curl's default, too
        answer = served.post(route, content=json.dumps(CHAT).encode(), headers={"content-type": kind})
        assert answer.status_code == 415 and "content-type: application/json" in error_of(answer)["message"]
    for body in (b'{"model": "tiny",}', b'{"model": NaN}', b""):
        answer = served.post(route, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
        assert "line 1 column" in error_of(answer)["message"]


def test_schemas_that_are_deep_large_or_slow_are_refused_or_answered(served: Served) -> None:
    deep: Any = {"type": "string"}
    for _ in range(120):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(2000)}}
    slow = {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}
    many = {"type": "array", "items": {"type": "string", "pattern": "(a|b){500}"}, "minItems": 5000}
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    for schema in (deep, wide, slow, many, loop, {"$ref": "http://x/y"}, {"enum": []}, {"type": []}, {"allOf": 3}):
        start = time.monotonic()
        for body in (
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
            {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
             "tool_choice": "required"},
        ):  # fmt: skip
            answer = served.post("/v1/chat/completions", body)
            assert answer.status_code in (200, 400), (str(schema)[:80], answer.text)
        assert time.monotonic() - start < 20
    assert is_fine(served)


def test_a_body_or_headers_that_are_too_large_or_too_slow(served: Served) -> None:
    large = served.post("/v1/completions", {**CHAT, "prompt": "x" * 300_000})
    assert (large.status_code, error_of(large)["code"]) == (413, "body_too_large")

    def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    with suppress(httpx.TransportError):  # it closes while we are still writing
        assert served.post("/v1/completions", content=chunks()).status_code == 413
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
    slow_body = connect(served)
    slow_body.sendall(head + b"content-length: 10\r\n\r\n{")
    assert b" 408 " in read_all(slow_body, 5)
    long_headers = connect(served)
    long_headers.sendall(head + b"x-a: " + b"a" * 60_000)
    long_headers.sendall(b"a" * 60_000)
    assert b" 431 " in read_all(long_headers, 5)
    garbage = connect(served)
    garbage.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert b" 400 " in read_all(garbage, 5)
    assert is_fine(served)


def test_what_can_never_fit_is_not_even_tokenized(loaded: LoadedModel) -> None:
    with serving(ThreadEngine(loaded), max_waiting=8) as served:
        start = time.process_time()
        for route, body in (("chat/completions", {"messages": [{"role": "user", "content": "a b " * 3_000_000}]}),
                            ("completions", {"prompt": "a b " * 3_000_000})):  # fmt: skip
            answer = served.post(f"/v1/{route}", {"model": "tiny", **body})
            assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
        answer = served.post("/v1/completions", {"model": "tiny", "prompt": ["a"] * 1000, "n": 100})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "too_many_sequences")
        assert time.process_time() - start < 3 and served.gateway.body_bytes == 0


def test_bodies_together_have_a_limit(loaded: LoadedModel) -> None:
    with serving(ThreadEngine(loaded), max_all_bodies_bytes=250_000) as served:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 200000\r\n\r\n"
        first, second = connect(served), connect(served)
        first.sendall(head + b"x" * 150_000)
        wait_until(lambda: served.gateway.body_bytes == 150_000)
        second.sendall(head + b"x" * 150_000)
        assert b" 429 " in read_all(second, 5)
        first.close()
        wait_until(lambda: served.gateway.body_bytes == 0)
        assert is_fine(served)


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=10)


def read_all(connection: socket.socket, seconds: float) -> bytes:
    connection.settimeout(seconds)
    found = b""
    try:
        while piece := connection.recv(65_536):
            found += piece
    except (ConnectionResetError, BrokenPipeError):
        pass
    return found


def test_a_header_that_comes_byte_by_byte_is_cut_off_and_idle_connections_hold_up_nobody(served: Served) -> None:
    idle = [connect(served) for _ in range(200)]
    start, closed = time.monotonic(), False
    slow = connect(served)
    slow.settimeout(0.1)
    for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\n" * 9:
        try:
            slow.sendall(bytes([byte]))
            closed = slow.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            closed = True
        if closed:
            break
    assert closed and time.monotonic() - start < 8
    assert is_fine(served)
    for connection in idle:
        assert read_all(connection, 10) == b""  # closed by the server
        connection.close()
    wait_until(lambda: len(served.server.server_state.connections) <= 1, 10)  # our own may stay


def test_a_client_that_goes_away_frees_its_slot_at_once(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded, pause=0.02)
    with serving(engine) as served:
        for stream in (True, False):
            freed = engine.freed
            body = json.dumps({**FOREVER, "stream": stream, "n": 2}).encode()
            connection = connect(served)
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: engine.running == 2)
            connection.close()
            start = time.monotonic()
            wait_until(lambda: engine.running == 0, 5)
            assert engine.freed == freed + 2 and time.monotonic() - start < 1
        wait_until(lambda: [line["status"] for line in served.lines()] == [499, 499], 5)
        assert served.gateway.taken == 0 and not served.lines("internal_error")


def test_the_queue_is_bounded_and_says_when_to_come_again(loaded: LoadedModel) -> None:
    with serving(ThreadEngine(loaded, max_requests=1, pause=0.01), max_waiting=2) as served:
        statuses: list[int] = []

        def ask() -> None:
            answer = served.post("/v1/chat/completions", {**CHAT, "max_tokens": 40, "ignore_eos": True})
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1 and error_of(answer)["type"] == "rate_limit_error"
            statuses.append(answer.status_code)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses)[:3] == [200] * 3 and set(statuses) == {200, 429}
        assert served.post("/v1/chat/completions", {**CHAT, "n": 4}).status_code == 400
        assert is_fine(served)


def test_a_time_limit_is_504_and_in_a_stream_its_last_event(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded, pause=0.05)
    with serving(engine, request_seconds=0.4) as served:
        answer = served.post("/v1/chat/completions", FOREVER)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "timeout")
        with pytest.raises(openai.APIError, match="not answered within"):
            list(served.client().chat.completions.create(**CHAT, stream=True, extra_body={"ignore_eos": True,
                 "max_tokens": 900}))  # fmt: skip
        assert engine.running == 0 and [line["status"] for line in served.lines()] == [504, 504]


def test_every_route_but_health_needs_a_key(loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    admin, plain = add_key(file, "boss", admin=True), add_key(file, "phone")
    assert file.stat().st_mode & 0o777 == 0o600 and plain not in file.read_text()
    with serving(ThreadEngine(loaded), load_keys(file, Quota()), host=EVERYWHERE) as served:
        found = all_paths(served.server.config.app._app)
        paths = {path.format(name="main.js", path="x") for path in found} | {"/nothing", "/v1/x/../models"}
        assert paths > {"/", "/page/main.js", "/openapi.json", "/metrics", "/v1/embeddings", "/admin/reload"}
        for path in paths:
            for method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE"):
                for headers in (
                    {},
                    bearer("x" * 40),
                    {"authorization": plain},
                    {"authorization": "Basic !"},
                ):
                    status = served.http.request(method, path, headers=headers).status_code
                    assert status == 401 or (path == "/health" and status in (200, 405)), (method, path, status)
        assert served.get("/health").status_code == 200
        assert served.post("/v1/chat/completions", CHAT, headers=bearer(plain)).status_code == 200
        basic = base64.b64encode(f"me:{plain}".encode()).decode()
        assert served.get("/v1/models", headers={"authorization": f"Basic {basic}"}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key="wrong").models.list()
        assert served.post("/admin/reload", {}, headers=bearer(plain)).status_code == 403
        assert served.post("/admin/reload", {"model": "no"}, headers=bearer(admin)).status_code == 400
        assert served.lines()[-1]["key"] == "boss" and plain not in str(served.lines())


def all_paths(app: Any) -> list[str]:
    """Of every route that the application has, those outside of its OpenAPI document, too."""
    return [route.path.replace(":path", "") for route in app.routes]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_limits_of_a_key(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOJOURN_API_KEY", "k" * 20)
    with serving(ThreadEngine(loaded), load_keys(None, Quota(requests_per_minute=3, tokens_per_day=40))) as served:
        assert served.get("/v1/models").status_code == 401  # also on this machine, once there are keys
        found = [served.post("/v1/chat/completions", CHAT, headers=bearer("k" * 20)) for _ in range(4)]
        assert [one.status_code for one in found] == [200, 200, 200, 429]
        assert error_of(found[3])["code"] == "requests_limit_exceeded" and int(found[3].headers["retry-after"]) > 30


def test_limits_by_the_minute_and_the_day_end() -> None:
    now = [1000.0]
    admission, queue = Admission(clock=lambda: now[0], now=lambda: now[0]), Queue(1, 0)
    key = ApiKey("a", b"", Quota(requests_per_minute=2, concurrency=1, tokens_per_day=100))

    def code() -> str | None:
        try:
            with admission.admit(key, queue, 1):
                return None
        except ApiError as error:
            return error.code

    assert [code(), code(), code()] == [None, None, "requests_limit_exceeded"]
    now[0] += 61
    admission.count_tokens(key, 100)
    assert code() == "tokens_limit_exceeded"
    now[0] += 86_400
    assert code() is None
    now[0] += 61
    with admission.admit(key, queue, 1):
        assert code() == "concurrency_limit_exceeded"
    b, c = ApiKey("b", b""), ApiKey("c", b"")
    with admission.admit(b, queue, 1), pytest.raises(ApiError) as error, admission.admit(c, queue, 1):
        pass
    assert error.value.status == 429 and queue.taken == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nkey = 'short'", "at least 16"), ("[a]", "either key or sha256"), ("a = 1", "expected a table"),
        ("[a]\nkey = 'xxxxxxxxxxxxxxxxxxxx'\nspeed = 1", "unknown: speed"), ("[a", "not valid TOML"),
        ("[a]\nkey = 'xxxxxxxxxxxxxxxxxxxx'\nconcurrency = 0", "whole numbers"),
        ("[a]\nkey = 'xxxxxxxxxxxxxxxxxxxx'\n[b]\nkey = 'xxxxxxxxxxxxxxxxxxxx'", "the same key"),
    ],
)  # fmt: skip
def test_a_key_file_that_is_wrong_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UserError, match=message):
        load_keys(file, Quota())
    file.chmod(0o644)
    if os.name == "posix":
        with pytest.raises(UserError, match="chmod 600"):
            load_keys(file, Quota())


def test_web_pages_of_others_reach_nothing(loaded: LoadedModel, served: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[bad", "", "localhost.evil"):
        assert served.get("/v1/models", headers={"host": host}).status_code == 403, host
    for host in ("localhost:1", "127.0.0.1", "[::1]:80", "127.1.2.3"):
        assert served.get("/v1/models", headers={"host": host}).status_code == 200, host
    evil = {"origin": "http://evil.example"}
    assert served.post("/v1/chat/completions", CHAT, headers=evil).status_code == 403
    assert "access-control-allow-origin" not in served.get("/v1/models", headers=evil).headers
    own = {"origin": f"http://127.0.0.1:{served.port}"}
    assert served.post("/v1/chat/completions", CHAT, headers=own).status_code == 200
    good = {"origin": "http://good.example"}
    with serving(ThreadEngine(loaded), origins=("http://good.example",)) as open_to_one:
        answer = open_to_one.post("/v1/chat/completions", CHAT, headers=good)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://good.example")
        assert open_to_one.post("/v1/chat/completions", CHAT, headers=evil).status_code == 403


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9")))
    assert not any(map(is_loopback, (EVERYWHERE, "::", "192.168.1.2", "example.com", "localhost.example.com", "")))


def test_a_server_at_all_addresses_is_named_by_one_that_a_phone_can_open() -> None:
    with bind("127.0.0.1", 0) as here, bind(EVERYWHERE, 0) as everywhere:
        assert url_of(here) == f"http://127.0.0.1:{here.getsockname()[1]}"
        host, _, port = url_of(everywhere).removeprefix("http://").rpartition(":")
        everywhere.listen()
        with socket.create_connection((host, int(port)), timeout=10):
            pass


def test_without_a_key_the_server_does_not_listen_to_the_network(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOJOURN_API_KEY", raising=False)
    said = called("serve", str(tiny.base), "--host", EVERYWHERE)
    assert said.returncode == 2 and said.stderr.count("\n") == 1
    assert "sojourn serve --new-api-key" in said.stderr
