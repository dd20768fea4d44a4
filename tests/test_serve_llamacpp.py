"""`--engine llamacpp`: what it refuses before loading; how rows of the engine become sequences of llama.cpp; a
`llama-server` behind the gateway. llama.cpp itself is in tests/serve/test_real_programs.py."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import called
from sojourn.errors import UserError
from sojourn.infer.engine.request import Request
from sojourn.infer.find import FoundModel
from sojourn.infer.runtimes import llamacpp_process
from sojourn.infer.sampling import SamplingParams
from sojourn.serve.engines import llamacpp
from sojourn.serve.engines.base import EngineOptions
from sojourn.serve.engines.choose import choose_engine, open_engine
from sojourn.serve.engines.llamacpp_forward import GgufShape, LlamaForward, choose_cells, make_engine

VOCABULARY = 50


class FakeLlama:
    """llama.cpp's KV cache by its rules: positions follow each other, and no more tokens than there are cells. The
    logits of a token depend on all tokens before it."""

    def __init__(self, rewinds: bool = True) -> None:
        self._rewinds, self.rows, self.computed = rewinds, {}, 0

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        return getattr(self, do)(**given)

    def open_sequences(self, logits: str, batch: int, rows: int, cells: int, **_: Any) -> dict[str, Any]:
        self._logits = np.memmap(logits, np.float32, "w+", shape=(batch, VOCABULARY))
        self.rows, self._cells, self._batch = {row: [] for row in range(rows)}, cells, batch
        return {"vocabulary": VOCABULARY, "stops": [0], "rewinds": self._rewinds, "gpu": False}

    def forward(self, changes: list[Any], parts: list[Any]) -> dict[str, Any]:
        for kind, row, *rest in changes:
            if kind == "copy":
                assert not self.rows[rest[0]] and len(self.rows[row]) >= rest[1]
                self.rows[rest[0]] = self.rows[row][: rest[1]]
            else:
                assert self._rewinds or rest[0] == 0
                del self.rows[row][rest[0] :]
        outputs = 0
        assert sum(len(ids) for _, _, ids, _ in parts) <= self._batch
        for row, start, ids, wanted in parts:
            assert start == len(self.rows[row])
            for at, token in enumerate(ids):
                self.rows[row].append(token)
                self.computed += 1
                if at >= len(ids) - wanted:
                    seed = zlib.crc32(bytes(self.rows[row]))
                    self._logits[outputs] = np.random.default_rng(seed).random(VOCABULARY)
                    outputs += 1
        assert len({tuple(row[: at + 1]) for row in self.rows.values() for at in range(len(row))}) <= self._cells
        return {"code": 0}


def make(rows: int = 4, cells: int = 256, context: int = 128, rewinds: bool = True) -> tuple[Any, FakeLlama]:
    child: Any = FakeLlama(rewinds)
    forward = LlamaForward(child, Path("x.gguf"), rows, cells, False, shared=True)
    return make_engine(forward, rows, cells, context), child


def answers(engine: Any, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.tokens for request in requests]


def new(at: int, prompt: list[int], most: int = 12, **given: Any) -> Request:
    return Request(str(at), prompt, SamplingParams(**given), at, most, frozenset({0}))


@pytest.mark.parametrize("rewinds", [True, False])
def test_requests_with_common_beginnings_and_preemptions_get_what_each_gets_alone(rewinds: bool) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(1, VOCABULARY) for _ in range(60)] for _ in range(3)]
    asked = [[*prompts[at % 3][: rng.randrange(2, 60)], rng.randrange(1, VOCABULARY)] for at in range(40)]
    alone = [answers(make()[0], [new(at, prompt, 40)])[0] for at, prompt in enumerate(asked)]
    engine, _ = make(rows=6, cells=160, rewinds=rewinds)
    waiting = [new(at, prompt, 40) for at, prompt in enumerate(asked)]
    later = list(waiting)
    while later or engine.has_work:
        for _ in range(min(len(later), rng.randrange(3))):
            engine.add(later.pop(0))
        engine.step()
        if engine.scheduler.running and rng.random() < 0.1:  # a client goes away, and comes again
            gone = rng.choice(engine.scheduler.running)
            engine.cancel(gone)
            at = waiting.index(gone)
            waiting[at] = new(at, asked[at], 40)
            later.append(waiting[at])
    assert [request.tokens for request in waiting] == alone
    assert engine.scheduler.preemptions > 0
    assert (engine.scheduler.prefix_tokens > 0) is rewinds


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    engine, child = make()
    first = new(0, list(range(1, 41)))
    answers(engine, [first])
    before, second = child.computed, new(1, [*first.prompt, *first.tokens, 7, 8])
    answers(engine, [second])
    assert second.cached >= 40 and child.computed - before <= 3 + len(second.tokens)
    scored = new(2, first.prompt)
    scored.prompt_logprobs = 0
    answers(engine, [scored])
    assert scored.cached == 0 and len(scored.prompt_scores) == 39  # the prompt's own logits are needed


def test_the_cache_is_as_large_as_requests_and_memory_allow() -> None:
    shape = GgufShape(context=8192, kv_bytes_per_token=1 << 14, long_rope=False)
    assert choose_cells(shape, None, 16, 100 << 30, "cpu") == (16_384, 8192)
    assert choose_cells(shape, 100, 2, 100 << 30, "cpu") == (208, 100)
    cells, context = choose_cells(shape, None, 16, 256 << 20, "cpu")
    assert cells == context == (64 << 20) // (1 << 14)
    assert choose_cells(GgufShape(100_000, 1, False), None, 16, 1 << 30, "cpu") == (100_000, 100_000)


@pytest.fixture
def file(tmp_path: Path) -> FoundModel:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(50))
    return FoundModel(path)


def test_what_will_not_work_is_said_before_loading(
    file: FoundModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = EngineOptions("llamacpp")
    monkeypatch.setattr(llamacpp_process, "find_python", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install llama-cpp-python.*llama-server on PATH"):
        open_engine(file, asked)
    assert choose_engine(file, EngineOptions()) == "builtin"
    monkeypatch.setattr(llamacpp_process, "find_python", lambda: "python")
    assert choose_engine(file, EngineOptions()) == "llamacpp"
    assert choose_engine(file, EngineOptions(adapters={"a": "b"})) == "builtin"
    assert choose_engine(FoundModel(tmp_path), EngineOptions()) == "builtin"
    for found, options, message in (
        (FoundModel(tmp_path), asked, "sojourn export … --to gguf, or try: --engine builtin"),
        (file, EngineOptions("llamacpp", quantization="int8"), "--quantize"),
        (file, EngineOptions("llamacpp", adapters={"a": "b"}), "--engine builtin"),
        (file, asked, "not a whole GGUF file"),
        (file, EngineOptions("vllm"), "--engine llamacpp"),
        (file, EngineOptions("llamacpp", vllm_args="--x"), "for --engine vllm only"),
    ):
        if options.engine == "vllm":
            monkeypatch.setattr("sojourn.serve.engines.vllm.VLLM", type("Here", (), {"why_unavailable": str})())
        with pytest.raises(UserError, match=message):
            open_engine(found, options)
    said = called("serve", str(file.path), "--engine", "builtin")
    assert said.returncode == 2 and "not a whole GGUF file" in said.stderr and said.stderr.count("\n") == 1


def test_requests_to_llama_server_have_openais_defaults_and_nothing_is_ignored(file: FoundModel) -> None:
    engine = llamacpp.LlamaServerEngine(file.path, EngineOptions())
    given = engine.translate("/chat/completions", {"messages": [], "repetition_penalty": 1.3, "top_k": -1})
    assert (given["temperature"], given["top_p"], given["top_k"], given["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert given["repeat_penalty"] == 1.3 and "repetition_penalty" not in given
    for wrong in ({"n": 2}, {"echo": True}, {"stop_token_ids": [3]}, {"tool_choice": {"type": "function"}}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            engine.translate("/chat/completions", wrong)
