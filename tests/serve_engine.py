"""A real engine for tests of the gateway: a tiny transformers model in a thread, one token of each sequence in turn.
And a real server around it, on a port of this machine."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import DynamicCache

from sojourn.errors import UserError
from sojourn.infer.engine.request import Token
from sojourn.infer.generate import find_stop_ids
from sojourn.infer.grammar import GrammarCompiler
from sojourn.infer.load import LoadedModel, context_length, load_model
from sojourn.infer.sampling import Sampler, SamplingRow
from sojourn.serve.auth import KeyRing
from sojourn.serve.deployment import Deployment
from sojourn.serve.engines.base import EngineDied, EngineInfo, EngineStats, GenerationRequest, Output
from sojourn.serve.feedback import FeedbackFolder
from sojourn.serve.gateway import Gateway
from sojourn.serve.request_log import RequestLog
from sojourn.serve.server import Server
from sojourn.serve.settings import Settings
from sojourn.web.address import bind


def long_base(base: Path) -> Path:
    """The tiny model with a context of 1,024 tokens: tools and schemas are long prompts."""
    folder = base.parent / "long"
    if not folder.exists():
        shutil.copytree(base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return folder


class ThreadEngine:
    """`pause`: seconds between tokens, for tests that need a slow model."""

    def __init__(self, loaded: LoadedModel, name: str = "tiny", max_requests: int = 4, pause: float = 0.0) -> None:
        self._models, self._tokenizer, self.pause = {None: loaded.model}, loaded.tokenizer, pause
        vocab = loaded.model.config.vocab_size
        stop_ids = find_stop_ids(loaded.model, loaded.tokenizer)
        self.info = EngineInfo(
            name, loaded.tokenizer_folder or loaded.path, context_length(loaded.model), vocab, max_requests, stop_ids
        )
        self._grammars = GrammarCompiler(loaded.tokenizer, vocab, stop_ids)
        self._thread, self._slots = ThreadPoolExecutor(1), asyncio.Semaphore(max_requests)
        self.loading = threading.Event()  # cleared: it is still being loaded
        self.restarting = threading.Event()  # cleared: it is not started again yet
        self.loading.set()
        self.restarting.set()
        self.running = self.generated = self.freed = self.restarts = 0
        self.died = self.dies_with_next = False

    async def start(self) -> None:
        while not self.loading.is_set():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def restart(self) -> None:
        while not self.restarting.is_set():
            await asyncio.sleep(0.01)
        self.died = False
        self.restarts += 1

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        loop = asyncio.get_running_loop()
        async with self._slots:
            self.running += 1
            try:
                model = self._models[request.adapter]
                sequence = await loop.run_in_executor(self._thread, self._open, model, request)
                if self.dies_with_next:
                    self.died, self.dies_with_next = True, False
                while True:
                    if self.died:
                        raise EngineDied("killed by a test")
                    output = await loop.run_in_executor(self._thread, sequence.step)
                    self.generated += len(output.tokens)
                    yield output
                    if output.finish_reason is not None:
                        return
                    await asyncio.sleep(self.pause)
            finally:
                self.running -= 1
                self.freed += 1

    def _open(self, model: Any, request: GenerationRequest) -> _Sequence:
        grammar = request.grammar
        return _Sequence(model, request, None if grammar is None else self._grammars.mask(grammar.kind, grammar.text))

    def why_dead(self) -> str:
        return "killed by a test" if self.died else ""

    async def stats(self) -> EngineStats:
        return EngineStats(running=self.running)

    async def load_adapter(self, name: str, path: Path) -> None:
        loaded = await asyncio.to_thread(load_model, str(path), "cpu")
        if loaded.model.config.vocab_size != self.info.vocab_size:
            raise UserError(f"{path}: of another model")
        self._models[name] = loaded.model
        self.info = replace(self.info, adapters=(*self.info.adapters, name))

    async def unload_adapter(self, name: str) -> None:
        del self._models[name]
        self.info = replace(self.info, adapters=tuple(one for one in self.info.adapters if one != name))

    async def reload(self, path: Path) -> None:
        loaded = await asyncio.to_thread(load_model, str(path), "cpu")
        if loaded.model.config.vocab_size != self.info.vocab_size:
            raise UserError(f"{path}: of another model")
        self._models[None] = loaded.model


class _Sequence:
    def __init__(self, model: Any, request: GenerationRequest, mask: Any) -> None:
        self._model, self._request, self._mask, self._cache = model, request, mask, DynamicCache(config=model.config)
        row = SamplingRow(request.params, request.prompt, request.key)
        self._sampler = Sampler([row], model.config.vocab_size, "cpu")
        self._next, self._count = list(request.prompt), 0

    @torch.no_grad()
    def step(self) -> Output:
        request = self._request
        found = self._model(input_ids=torch.tensor([self._next]), past_key_values=self._cache, use_cache=True)
        logits = found.logits[0].float()
        scored = None
        if self._count == 0 and request.prompt_logprobs is not None:
            scores = logits.log_softmax(-1)
            rest = zip(request.prompt[1:], scores[:-1], strict=True)
            scored = (None, *(_token(id, row, request.prompt_logprobs) for id, row in rest))
        last = logits[-1:].clone()
        if self._mask is not None:
            allowed = torch.zeros(last.shape[-1], dtype=torch.bool)
            self._mask.fill(allowed)
            last[0, ~allowed] = -torch.inf
        token = int(self._sampler(last))
        if self._mask is not None:
            self._mask.accept(token)
        self._next, self._count = [token], self._count + 1
        made = Token(token)
        if request.logprobs is not None:
            made = _token(token, logits[-1].log_softmax(-1), request.logprobs)
        ended = token in request.stop_ids
        finish = "stop" if ended else "length" if self._count >= request.max_tokens else None
        return Output((made,), finish, prompt_logprobs=scored)


def _token(id: int, scores: Any, alternatives: int) -> Token:
    top = scores.topk(alternatives)
    return Token(id, float(scores[id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


class Served:
    """A running server."""

    def __init__(self, server: Server, engine: Any, port: int, log: io.StringIO) -> None:
        self.server, self.gateway, self.engine, self.port, self._log = server, server.gateway, engine, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.http.get(path, **given)

    def post(self, path: str, body: Any = None, **given: Any) -> httpx.Response:
        return self.http.post(path, **({"json": body} if body is not None else {}), **given)

    def client(self, **given: Any) -> Any:
        from openai import OpenAI

        return OpenAI(**{"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **given})

    def lines(self, event: str = "request") -> list[dict[str, Any]]:
        self.gateway.log.wait()
        found = [json.loads(line) for line in self._log.getvalue().splitlines()]
        return [line for line in found if line["event"] == event]

    def call(self, function: Any) -> None:
        """In the server's thread."""
        self.server._loop.call_soon_threadsafe(function)


@contextmanager
def serving(
    engine: Any, keys: KeyRing | None = None, source: str = "", starting: bool = False,
    feedback: FeedbackFolder | None = None, others: Sequence[Deployment] = (), **settings: Any,
) -> Iterator[Served]:  # fmt: skip
    """`starting`: do not wait until the model is loaded."""
    chosen = Settings(**{"port": 0, **settings})
    listening, log = bind("127.0.0.1", chosen.port), io.StringIO()
    port = listening.getsockname()[1]  # a server that cannot start closes it at once
    deployments = [Deployment("tiny", engine, source), *others]
    gateway = Gateway(deployments, chosen, keys or KeyRing([]), RequestLog(log), feedback)
    server = Server(gateway)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    served = Served(server, engine, port, log)
    try:
        wait_until(lambda: server.started or gateway.failure, 120)  # a tiny model may be loaded before it listens
        wait_until(lambda: starting or gateway.lifecycle.state in ("ready", "failed"), 120)
        yield served
    finally:
        served.http.close()
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        gateway.log.close()
    assert not thread.is_alive()


class Command:
    """`sojourn serve` in a process of its own."""

    def __init__(self, model: str, *args: str) -> None:
        command = [sys.executable, "-m", "sojourn", "serve", model, "--name", "real", "--port", "0", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: any("/v1" in line for line in self.lines), 120)
        self.url = next(word for line in self.lines for word in line.split() if word.startswith("http"))
        wait_until(self._is_ready, 400)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.lines)
        try:
            return httpx.get(self.url.removesuffix("/v1") + "/health").status_code == 200
        except httpx.TransportError:
            return False


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.01)
