"""The process of an engine that takes token ids: reads commands from a pipe, computes, and writes what became of them.

One message a step carries the new tokens of all requests, most of them as bare numbers: 128 objects take a tenth of a
step to write, and another to read. Commands are taken between steps, so a cancelled request
frees its row before the next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sojourn.errors import RunFailed, UserError
from sojourn.infer.engine.request import Token
from sojourn.serve.engines.base import EngineInfo, EngineStats, GenerationRequest, Output

if TYPE_CHECKING:
    from sojourn.infer.engine import engine as builtin
    from sojourn.infer.engine.request import Request
    from sojourn.infer.grammar import GrammarCompiler

_STATS_SECONDS = 0.5
_IDLE_SECONDS = 1.0
_LLAMACPP_ROWS = 16


@dataclass(frozen=True)
class ModelToServe:
    """What the process opens. `settings`: of `EngineSettings`. `adapters`: names and folders. `kind`: what computes the
    steps: our own kernels, or llama.cpp."""

    name: str
    device: str
    checkpoint: str | None
    settings: dict[str, Any]
    adapters: tuple[tuple[str, str], ...] = ()
    kind: Literal["builtin", "llamacpp"] = "builtin"


@dataclass(frozen=True)
class Opened:
    """`check`: raises RunFailed where what computes the steps is gone."""

    engine: builtin.DecodeLoop
    tokenizer: Any
    info: EngineInfo
    check: Callable[[], None] = lambda: None


def run(connection: Connection, model: ModelToServe) -> None:
    """Until the pipe is closed. Sends ("failed", message) where the model cannot be opened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway drains, and closes the pipe
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the gateway ended first
        try:
            process = _Process(connection, model)
        except (UserError, RunFailed) as error:
            connection.send(("failed", str(error)))
            return
        except (RuntimeError, MemoryError) as error:  # memory of the device, mostly
            connection.send(("failed", f"{model.name}: {(str(error).strip().splitlines() or ['out of memory'])[0]}"))
            return
        try:
            process.serve()
        except RunFailed as error:
            connection.send(("ended", str(error)))
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, which torch takes seconds for


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class _Process:
    def __init__(self, connection: Connection, model: ModelToServe) -> None:
        self._connection, self._kind = connection, model.kind
        opened = (open_llamacpp if model.kind == "llamacpp" else open_builtin)(model)
        self._engine, self._tokenizer, self._info, self._check_alive = (
            opened.engine, opened.tokenizer, opened.info, opened.check,
        )  # fmt: skip
        asked, context = model.settings.get("context") or 0, opened.info.context_length
        if asked > context:
            print(f"note: --max-length {asked:,}: the model's context is {context:,}", file=sys.stderr, flush=True)
        for name, folder in model.adapters:
            self._with_adapters().load_adapter(name, Path(folder))
        self._grammars: GrammarCompiler | None = None
        self._requests: dict[str, Request] = {}
        self._closing: set[str] = set()  # adapters that go when their last request ends
        self._stats, self._stats_sent = EngineStats(), 0.0
        self._engine.warm_up()
        connection.send(("ready", replace(self._info, adapters=self._adapters())))

    def serve(self) -> None:
        while True:
            while self._connection.poll(0 if self._engine.has_work else _IDLE_SECONDS):
                try:
                    command, *args = self._connection.recv()
                except EOFError:
                    return
                if command == "close":
                    return
                self._commands[command](self, *args)
            if not self._engine.has_work:
                self._check_alive()
            self._send_outputs(self._engine.step())
            self._send_stats()

    def _send_outputs(self, outputs: list[builtin.Output]) -> None:
        tokens, others = {}, []
        for one in outputs:
            request = one.request
            is_plain = len(one.tokens) == 1 < len(request.tokens) and request.finish_reason is None
            if is_plain and request.logprobs is None:
                tokens[request.id] = one.tokens[0].id
            else:
                others.append(self._output(one))
        if outputs:
            self._connection.send(("outputs", tokens, others))

    def _add(self, asked: GenerationRequest) -> None:
        from sojourn.infer.engine.request import Request

        try:
            self._check(asked)
            mask = None if asked.grammar is None else self._compiler().mask(asked.grammar.kind, asked.grammar.text)
        except UserError as error:
            self._connection.send(("outputs", {}, [(asked.id, Output(finish_reason="error", error=str(error)))]))
            return
        request = Request(
            asked.id, asked.prompt, asked.params, asked.key, asked.max_tokens, asked.stop_ids, asked.adapter,
            asked.logprobs, asked.prompt_logprobs, mask,
        )  # fmt: skip
        self._requests[asked.id] = request
        self._engine.add(request)

    def _check(self, asked: GenerationRequest) -> None:
        engine = self._engine
        if asked.adapter is not None and (asked.adapter not in self._adapters() or asked.adapter in self._closing):
            raise UserError(f"the adapter {asked.adapter} is not loaded")
        total = len(asked.prompt) + asked.max_tokens
        if not asked.prompt or total > min(engine.options.context, engine.scheduler.capacity):
            raise UserError(f"{total:,} tokens do not fit the context or the KV cache of the engine")
        if not all(0 <= token < self._info.vocab_size for token in asked.prompt):
            raise UserError("the prompt has a token that the model does not have")

    def _compiler(self) -> GrammarCompiler:
        from sojourn.infer.grammar import GrammarCompiler

        if self._grammars is None:
            self._grammars = GrammarCompiler(self._tokenizer, self._info.vocab_size, self._info.stop_ids)
        return self._grammars

    def _cancel(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._engine.cancel(request)
            self._unload_unused()

    def _with_adapters(self) -> builtin.Engine:
        from sojourn.infer.engine.engine import Engine

        if not isinstance(self._engine, Engine):
            raise UserError(f"--engine {self._kind} has no adapters; try: --engine builtin")
        return self._engine

    def _adapters(self) -> tuple[str, ...]:
        return tuple(self._with_adapters().adapters.indices) if self._kind == "builtin" else ()

    def _load_adapter(self, ticket: int, name: str, folder: str) -> None:
        try:
            self._with_adapters().load_adapter(name, Path(folder))
        except (UserError, RunFailed) as error:
            self._connection.send(("done", ticket, str(error)))
            return
        self._connection.send(("done", ticket, None))

    def _unload_adapter(self, ticket: int, name: str) -> None:
        self._closing.add(name)
        self._unload_unused()
        self._connection.send(("done", ticket, None))

    def _unload_unused(self) -> None:
        for name in [one for one in self._closing if all(r.adapter != one for r in self._requests.values())]:
            self._with_adapters().unload_adapter(name)
            self._closing.remove(name)

    def _output(self, output: builtin.Output) -> tuple[str, Output]:
        request = output.request
        is_first = len(request.tokens) == len(output.tokens)
        scores: tuple[Token | None, ...] = (None, *request.prompt_scores)
        found = Output(
            output.tokens,
            None if request.finish_reason == "cancelled" else request.finish_reason,
            request.error,
            request.cached if is_first else 0,
            scores if is_first and request.prompt_logprobs is not None else None,
        )
        if request.finish_reason is not None:
            self._requests.pop(request.id, None)
            self._unload_unused()
        return request.id, found

    def _send_stats(self) -> None:
        """Where they changed; not after every step."""
        if self._engine.has_work and time.monotonic() - self._stats_sent < _STATS_SECONDS:
            return
        scheduler = self._engine.scheduler
        stats = EngineStats(
            len(scheduler.running), len(scheduler.waiting), scheduler.pool.total - scheduler.pool.free,
            scheduler.pool.total, scheduler.prefix_tokens, scheduler.preemptions,
        )  # fmt: skip
        if stats != self._stats:
            self._stats, self._stats_sent = stats, time.monotonic()
            self._connection.send(("stats", stats))

    _commands: ClassVar[dict[str, Callable[..., None]]] = {
        "add": _add, "cancel": _cancel, "load_adapter": _load_adapter, "unload_adapter": _unload_adapter,
    }  # fmt: skip


def open_builtin(model: ModelToServe) -> Opened:
    from sojourn.infer.generate import find_stop_ids
    from sojourn.infer.load import load_model
    from sojourn.infer.open_engine import EngineSettings, open_engine

    loaded = load_model(model.name, model.device, model.checkpoint)
    settings = EngineSettings(**model.settings)
    stop_ids, folder = find_stop_ids(loaded.model, loaded.tokenizer), loaded.tokenizer_folder or loaded.path
    engine = open_engine(loaded, settings)
    decoder, dtype = engine.decoder, str(engine.decoder.dtype).removeprefix("torch.")
    info = EngineInfo(
        model.name, folder, engine.options.context, decoder.vocab_size, settings.max_rows, stop_ids, (), loaded.device,
        dtype,
    )  # fmt: skip
    return Opened(engine, loaded.tokenizer, info)


def open_llamacpp(model: ModelToServe) -> Opened:
    from sojourn.data.tokenize.gguf_tokenizer import extract_tokenizer
    from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer
    from sojourn.serve.engines.llamacpp_forward import open_llama_engine

    path, rows = Path(model.name), int(model.settings.get("max_rows") or _LLAMACPP_ROWS)
    folder = extract_tokenizer(path)
    engine, forward = open_llama_engine(path, rows, model.settings.get("context"), model.device)
    info = EngineInfo(
        model.name, folder, engine.options.context, forward.vocab_size, rows, forward.stop_ids, (), forward.device,
        "as in the GGUF file",
    )  # fmt: skip
    return Opened(engine, open_tokenizer(folder), info, forward.check)
