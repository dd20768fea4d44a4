"""Running a server: start, drain, reload, adapters, a dead engine, metrics, the log, an engine behind a proxy."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from conftest import called
from serve_engine import Command, Served, ThreadEngine, long_base, serving, wait_until
from sojourn.errors import UserError
from sojourn.infer.load import LoadedModel, load_model
from sojourn.serve.deployment import Deployment
from sojourn.serve.engines.base import EngineInfo, EngineStats
from sojourn.serve.request_log import RequestLog

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What colour is the cat?"}], "max_tokens": 4}
LONG = {**CHAT, "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(long_base(tiny.base)), "cpu")


@pytest.fixture(scope="module")
def other(tiny, loaded: LoadedModel) -> Path:
    """The same model with other weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tiny.home / "other"
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(loaded.path)).save_pretrained(folder)
    return with_tokenizer(folder, loaded)


def with_tokenizer(folder: Path, loaded: LoadedModel) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((loaded.path / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def adapter(tiny, loaded: LoadedModel) -> Path:
    """A LoRA adapter of the model, with random weights that change its answers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(loaded.path), LoraConfig(init_lora_weights=False))
    model.save_pretrained(tiny.home / "adapter")
    return with_tokenizer(tiny.home / "adapter", loaded)


def say(served: Served, **given: Any) -> str:
    answer = served.post("/v1/chat/completions", {**LONG, "max_tokens": 8, **given})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_before_it_is_ready_it_answers_503_and_says_so(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded)
    engine.loading.clear()
    with serving(engine, starting=True) as served:
        for path in ("/health", "/v1/models"):
            assert served.get(path).status_code == 503
        answer = served.post("/v1/chat/completions", CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        assert answer.headers["retry-after"] and "sojourn_ready 0" in served.get("/metrics").text
        engine.loading.set()
        wait_until(lambda: served.get("/health").status_code == 200)
        assert say(served)
        assert [line["event"] for line in served.lines("ready")] == ["ready"]


def test_a_model_that_cannot_be_loaded_ends_the_server(loaded: LoadedModel) -> None:
    class Broken(ThreadEngine):
        async def start(self) -> None:
            raise UserError("it is broken; take another one")

    with serving(Broken(loaded)) as served:
        wait_until(lambda: not served.server.servers[0].is_serving(), 5)
        assert str(served.gateway.failure) == "it is broken; take another one"


def test_a_drain_finishes_what_runs_and_accepts_nothing_more(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded, pause=0.02)
    with serving(engine, grace_seconds=20) as served:
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(served.post("/v1/chat/completions", LONG)))
        streamed = served.client().chat.completions.create(**{**CHAT, "max_tokens": 60}, stream=True,
                                                           extra_body={"ignore_eos": True})  # fmt: skip
        asking.start()
        wait_until(lambda: engine.running == 2)
        served.call(served.server.drain)
        wait_until(lambda: not served.server.servers[0].is_serving())
        with pytest.raises(openai.APIConnectionError):
            served.client().models.list()
        assert sum(1 for _ in streamed) > 10
        asking.join()
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 60
        assert served.lines("draining")[0]["sequences"] == 2


def test_what_outlasts_the_grace_period_ends_with_an_error(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded, pause=0.05)
    with serving(engine, grace_seconds=0.3) as served:
        answers: list[Any] = []
        body = {**LONG, "max_tokens": 500}
        asking = threading.Thread(target=lambda: answers.append(served.post("/v1/chat/completions", body)))
        asking.start()
        wait_until(lambda: engine.running == 1)
        start = time.monotonic()
        served.call(served.server.drain)
        asking.join()
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
        assert engine.running == 0 and time.monotonic() - start < 2


def test_a_reload_changes_the_weights_and_drops_no_request(loaded: LoadedModel, other: Path) -> None:
    engine = ThreadEngine(loaded, pause=0.01)
    with serving(engine, source=str(loaded.path)) as served:
        before, long = say(served), say(served, max_tokens=60)
        running: list[str] = []
        asking = threading.Thread(target=lambda: running.append(say(served, max_tokens=60)))
        asking.start()
        wait_until(lambda: engine.running == 1)
        deployment = served.gateway.deployments[0]
        fingerprint = deployment.model.id
        assert served.post("/admin/reload", {"model": str(other)}).status_code == 200
        after = say(served)
        asking.join()
        assert running == [long] and after != before and deployment.model.id != fingerprint
        assert served.post("/admin/reload", {}).status_code == 200 and say(served) == before
        for wrong in ("nowhere", str(other.parent / "chats.jsonl")):
            assert served.post("/admin/reload", {"model": wrong}).status_code == 400
        assert say(served) == before
        served.call(lambda: served.server._on_hangup(1, None))
        wait_until(lambda: len(served.lines("reloaded")) == 3)


def test_adapters_are_loaded_chosen_by_name_and_unloaded(loaded: LoadedModel, adapter: Path, other: Path) -> None:
    with serving(ThreadEngine(loaded)) as served:
        plain = say(served)
        load = {"lora_name": "poet", "lora_path": str(adapter)}
        assert served.post("/v1/load_lora_adapter", load).status_code == 200
        assert [one["id"] for one in served.get("/v1/models").json()["data"]] == ["tiny", "poet"]
        assert say(served, model="poet") != plain == say(served)
        for wrong in (
            load,
            {**load, "lora_name": "tiny"},
            *({"lora_name": "x", "lora_path": path} for path in (str(other), "~~~", "~nobody1/x", "x\0y")),
        ):
            assert served.post("/v1/load_lora_adapter", wrong).status_code == 400
        assert served.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
        assert served.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 404
        assert served.post("/v1/chat/completions", {**CHAT, "model": "poet"}).status_code == 404


def test_a_dead_engine_is_started_again(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded, pause=0.01)
    with serving(engine) as served:
        for times, body in enumerate((LONG, {**LONG, "stream": True}), 1):  # a stream before its first token, too
            engine.dies_with_next = True
            answer = served.post("/v1/chat/completions", body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
            wait_until(lambda: served.get("/health").status_code == 200)
            assert say(served) and engine.restarts == times == len(served.lines("engine_restarted"))


def test_two_models_on_one_server(loaded: LoadedModel, other: Path, adapter: Path) -> None:
    """Each with its own queue, adapters, reloads and end of its engine."""
    second = ThreadEngine(load_model(str(other), "cpu"), "second", max_requests=2, pause=0.005)
    with serving(ThreadEngine(loaded), others=[Deployment("second", second, str(other))], max_waiting=0) as served:
        assert [one["id"] for one in served.get("/v1/models").json()["data"]] == ["tiny", "second"]
        first, beside = say(served), say(served, model="second")
        assert first != beside and served.lines()[-1]["model"] == "second"
        load = {"lora_name": "poet", "lora_path": str(adapter), "base_model_name": "second"}
        assert served.post("/v1/load_lora_adapter", load).status_code == 200
        assert served.get("/v1/models/poet").json()["parent"] == "second"
        for wrong in ({**load, "lora_name": "tiny"}, {**load, "lora_name": "second"}, load):
            assert served.post("/v1/load_lora_adapter", wrong).status_code == 400
        assert served.post("/v1/load_lora_adapter", {**load, "base_model_name": "no"}).status_code == 404
        assert served.post("/admin/reload", {"name": "second", "model": str(loaded.path)}).status_code == 200
        assert say(served, model="second") == first == say(served)
        text = served.get("/metrics").text
        assert 'sojourn_engine_running{model="tiny"} 0' in text and 'engine_running{model="second"} 0' in text
        asked = [threading.Thread(target=say, args=(served,), kwargs={"model": "second"}) for _ in range(2)]
        for thread in asked:
            thread.start()
        wait_until(lambda: second.running == 2)
        assert served.post("/v1/chat/completions", {**CHAT, "model": "second"}).status_code == 429
        assert say(served) == first  # whose queue is empty
        for thread in asked:
            thread.join()
        second.restarting.clear()
        second.died = True
        wait_until(lambda: served.get("/health").status_code == 503)
        assert served.post("/v1/chat/completions", {**CHAT, "model": "second"}).status_code == 503
        assert say(served) == first
        second.restarting.set()
        wait_until(lambda: served.get("/health").status_code == 200)
        assert say(served, model="second") == first and second.restarts == 1


def test_metrics_and_the_log_count_requests_and_have_no_prompts(loaded: LoadedModel) -> None:
    with serving(ThreadEngine(loaded)) as served:
        secret = "my secret is 12345"
        body = {**LONG, "max_tokens": 5, "messages": [{"role": "user", "content": secret}]}
        served.post("/v1/chat/completions", body)
        served.post("/v1/chat/completions", {**body, "model": "no"})
        served.get("/some/made/up/path")
        text = served.get("/metrics").text
        assert 'requests_total{route="POST /v1/chat/completions",status="200"} 1' in text
        assert 'requests_total{route="POST /v1/chat/completions",status="404"} 1' in text
        assert 'route="GET other",status="404"' in text and "made" not in text
        assert "sojourn_completion_tokens_total 5" in text and "sojourn_sequences 0" in text
        assert "sojourn_time_to_first_token_seconds_count 1" in text and 'le="+Inf"' in text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert all(name.startswith("sojourn_") for name in names) and len(names) > 10
        first = served.lines()[0]
        assert (first["status"], first["completion_tokens"], first["finish_reason"]) == (200, 5, "length")
        assert secret not in json.dumps(served.lines())
    with serving(ThreadEngine(loaded), log_prompts=True) as served:
        served.post("/v1/chat/completions", body)
        assert served.lines()[0]["prompt"] == [{"role": "user", "content": secret}]


class Behind:
    """An engine that speaks OpenAI's API: another server of ours."""

    def __init__(self, url: str, info: EngineInfo) -> None:
        self.base_url, self.info = url + "/v1", info

    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def restart(self) -> None: ...

    def transport(self) -> None:
        return None

    async def health(self) -> bool:
        return True

    def why_dead(self) -> str:
        return ""

    def translate(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def stats(self) -> EngineStats:
        return EngineStats()


def test_an_engine_with_an_api_of_its_own_is_proxied(loaded: LoadedModel) -> None:
    engine = ThreadEngine(loaded, pause=0.005)
    with serving(engine) as inner, serving(Behind(inner.url, replace(engine.info, model="x"))) as served:
        assert say(served) == say(inner)
        client = served.client()
        chunks = list(client.chat.completions.create(**CHAT, stream=True, temperature=0))
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == say(inner, max_tokens=4)
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**{**CHAT, "max_tokens": 5000})
        assert error.value.code == "context_length_exceeded"
        assert client.responses.create(model="tiny", input="hi", max_output_tokens=3).output_text is not None
        assert served.gateway.metrics.completion_tokens >= 12 and served.lines()[0]["completion_tokens"] == 8
        stream = client.chat.completions.create(**{**CHAT, "max_tokens": 900}, stream=True,
                                                extra_body={"ignore_eos": True})  # fmt: skip
        next(iter(stream))
        stream.close()
        wait_until(lambda: engine.running == 0, 5)  # the client's going away reaches the engine
        inner.server.should_exit = True
        wait_until(lambda: not inner.server.servers[0].is_serving())
        wait_until(lambda: served.post("/v1/chat/completions", CHAT).status_code == 503)


def test_a_slow_reader_holds_up_nobody(loaded: LoadedModel) -> None:
    """A client that does not read its stream: others are answered, and its time limit ends it."""
    import socket

    engine = ThreadEngine(loaded)
    with serving(engine, request_seconds=3) as served:
        body = json.dumps({**LONG, "stream": True, "max_tokens": 900, "logprobs": True, "top_logprobs": 20})
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", served.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: engine.running > 0)
        assert asyncio.run(asyncio.wait_for(asyncio.to_thread(say, served), 20))
        wait_until(lambda: served.gateway.taken == 0, 20)
        slow.close()


class PausedStream(io.StringIO):
    """A terminal that was paused: writing waits."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.goes_on.wait(60)
        return super().write(text)


def test_a_log_that_nobody_reads_holds_up_nobody_and_says_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn.serve.request_log._MOST_LINES", 3)
    monkeypatch.setattr("sojourn.serve.request_log._END_SECONDS", 0.01)
    stream = PausedStream()
    log = RequestLog(stream)
    log.write("request", number=0)
    wait_until(log._lines.empty)  # the thread has it, and waits
    for number in range(1, 10):
        log.write("request", number=number)
    log.close()  # does not wait for ever
    stream.goes_on.set()
    log.wait()
    log.write("request", number=10)
    log.wait()
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["number"] for line in found] == [0, 1, 2, 3, 10] and found[-1]["lines_lost_before"] == 6


def test_the_page_is_at_the_root_and_hides_no_route(loaded: LoadedModel) -> None:
    with serving(ThreadEngine(loaded)) as served:
        assert "<title>" in served.get("/").text and served.get("/page/main.js").status_code == 200
        for path in ("/../../etc/passwd", "/nothing", "/v1/nothing", "/%2e%2e/x", "/admin/x", "/\x00"):
            answer = served.get(path.replace("\x00", "%00"))
            assert answer.status_code == 404 and answer.json()["error"]["message"], path
        assert served.get("/v1/completions").status_code == 405 and served.post("/", {}).status_code == 405
        assert not served.lines("internal_error")


def ask(command: Command, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(command.url + "/chat/completions", json={**body, "temperature": 0}, timeout=60)
    assert answer.status_code == 200, (answer.text, command.lines)
    return dict(answer.json())


@pytest.mark.slow
def test_the_command_reloads_at_sighup_and_ends_with_zero_at_sigterm(loaded: LoadedModel) -> None:
    command = Command(str(loaded.path))
    try:
        port = command.url.split(":")[-1].split("/")[0]
        taken = called("serve", str(loaded.path), "--port", port)
        assert taken.returncode == 2 and f"--port {int(port) + 1}" in taken.stderr
        body = {**CHAT, "model": "real"}
        before = ask(command, body)
        long = {**body, "messages": [{"role": "user", "content": "cat " * 40}], "max_tokens": 8, "ignore_eos": True}
        usage = [ask(command, long)["usage"] for _ in range(2)][1]  # the prefix is counted once, not for each token
        assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        command.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any('"reloaded"' in line for line in command.lines), 200)
        after = ask(command, body)
        assert before["choices"] == after["choices"] and before["system_fingerprint"] != after["system_fingerprint"]
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == 0
        assert not [line for line in command.lines if "Traceback" in line or "internal_error" in line]
    finally:
        command.process.kill()
