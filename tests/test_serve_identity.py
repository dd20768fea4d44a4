"""What a request gets does not depend on the requests beside it: many clients over HTTP, arriving at random, some of
whom leave, with prompts that begin alike and a KV cache so small that requests are preempted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_engine import Served, long_base, serving
from sojourn.serve.engines.builtin import BuiltinEngine
from sojourn.serve.engines.builtin_process import ModelToServe

REAL = os.environ.get("SOJOURN_REAL_MODEL", "")


@contextmanager
def served_with(model: Path, kv_bytes: int | None) -> Iterator[Served]:
    settings = {"context": 512, "max_rows": 16, "kv_bytes": kv_bytes}
    with serving(BuiltinEngine(ModelToServe(str(model), "cpu", None, settings))) as served:
        assert served.gateway.lifecycle.state == "ready", served.gateway.failure
        yield served


def make_bodies(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Half greedy, half sampled with a seed; three beginnings; log probabilities, so that rounding would show."""
    words = ("cat", "dog", "tree", "the", "red", "of", "runs", "small", "house", "and")
    starts = [" ".join(rng.choices(words, k=rng.randrange(40, 90))) for _ in range(3)]
    bodies = []
    for at in range(count):
        prompt = f"{rng.choice(starts)} {' '.join(rng.choices(words, k=rng.randrange(1, 30)))}"
        sampled = {
            "temperature": rng.choice((0.7, 1.0, 1.5)),
            "seed": at,
            **rng.choice(({}, {"top_k": 20}, {"top_p": 0.9})),
        }
        shape = {"n": 2, **sampled} if at % 8 == 1 else sampled if at % 2 else {"temperature": 0}
        bodies.append({
            "model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 40), "logprobs": 2, "ignore_eos": True,
            "stream": at % 3 > 0, **shape,
        })  # fmt: skip
    return bodies


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> dict[int, Any]:
    """Tokens and log probabilities by choice, streamed or not. `leave_after`: events after which the client leaves."""
    found: dict[int, Any] = {}

    def add(choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            tokens = found.setdefault(choice["index"], ([], [], []))
            if choice["logprobs"] is not None:
                tokens[0].extend(choice["logprobs"]["tokens"])
                tokens[1].extend(choice["logprobs"]["token_logprobs"])
                tokens[2].extend(choice["logprobs"]["top_logprobs"])

    if not body["stream"] and leave_after is None:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        add(answer.json()["choices"])
        return found
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                add(json.loads(line[6:])["choices"])
                if leave_after is not None and (leave_after := leave_after - 1) <= 0:
                    break
    return found


async def alone(url: str, bodies: list[dict[str, Any]]) -> list[dict[int, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return [await ask(client, body) for body in bodies]


async def together(url: str, bodies: list[dict[str, Any]], clients: int, rng: random.Random) -> list[dict[int, Any]]:
    """Each client asks at random times; every fifth request is cancelled after a few events and asked again."""
    found: list[dict[int, Any]] = [{} for _ in bodies]
    waiting = iter(rng.sample(range(len(bodies)), len(bodies)))

    async def one(client: httpx.AsyncClient) -> None:
        for at in waiting:
            await asyncio.sleep(rng.expovariate(20))
            if rng.random() < 0.2:
                await ask(client, bodies[at], leave_after=rng.randrange(1, 6))
            found[at] = await ask(client, bodies[at])

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return found


def counter(served: Served, name: str) -> int:
    found = re.search(rf"^sojourn_engine_{name}_total\{{.*\}} (\S+)", served.get("/metrics").text, re.M)
    assert found is not None
    return int(float(found[1]))


def check(model: Path, requests: int, clients: int, kv_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    bodies = make_bodies(requests, rng)
    with served_with(model, kv_bytes) as served:
        expected = asyncio.run(alone(served.url, bodies))
        assert counter(served, "preemptions") == 0
        for _ in range(2):
            found = asyncio.run(together(served.url, bodies, clients, rng))
            for at, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one == other, bodies[at]
        assert counter(served, "preemptions") > 0 and counter(served, "prefix_hit_tokens") > 0
        assert not served.lines("internal_error")


@pytest.mark.slow
def test_a_large_cache_gives_what_a_small_one_gives(tiny) -> None:
    bodies = make_bodies(100, random.Random(9))
    found = []
    for kv_bytes in (None, KV_TINY):
        with served_with(long_base(tiny.base), kv_bytes) as served:
            found.append(asyncio.run(alone(served.url, bodies)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_thirty_two_clients_get_what_each_would_get_alone(tiny, seed: int) -> None:
    check(long_base(tiny.base), requests=200, clients=32, kv_bytes=KV_TINY, seed=seed)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="SOJOURN_REAL_MODEL names no model")
def test_thirty_two_clients_of_a_real_model_get_what_each_would_get_alone() -> None:
    check(Path(REAL), requests=64, clients=32, kv_bytes=KV_REAL, seed=4)


KV_TINY = 1 << 19
KV_REAL = 12 << 20  # 270 tokens of SmolLM2
