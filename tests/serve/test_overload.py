"""Ten times what the server can do, for minutes, among requests that are malformed, oversized or slow, and clients that
leave: nothing crashes, memory stays flat, and a polite client is answered all the time, rightly.

SOJOURN_OVERLOAD_MINUTES: how long (1 by default). SOJOURN_REAL_MODEL: a model's folder; else the tiny one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from typing import Any

import httpx
import psutil

from serve_engine import Command, long_base

MINUTES = float(os.environ.get("SOJOURN_OVERLOAD_MINUTES", "1"))
HOSTILE = 1000
ROWS, WAITING = 8, 16
GROWTH = 48 << 20  # bytes that memory may grow by after the first quarter: what allocators keep
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
WORDS = ("the cat sat on the mat and ", "a small red house by the river, ", "once upon a time there was ")


class Load:
    """Counts what became of every kind of request."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng, self.counts = url, random.Random(seed), Counter[str]()
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)

    def body(self, tokens: int, **given: Any) -> dict[str, Any]:
        prompt = self.rng.choice(WORDS) * self.rng.randrange(1, 6) + str(self.rng.random())
        return {"model": "real", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **given}

    async def ask(self, tokens: int) -> int:
        """One request like most. Overload is 429 with Retry-After, and nothing else."""
        try:
            answer = await self.client.post("/v1/completions", json=self.body(tokens))
        except httpx.TransportError as error:
            self.counts[f"overload: {type(error).__name__}"] += 1
            return 0
        self.counts[f"overload: {answer.status_code}"] += 1
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
        return answer.status_code

    async def leave(self, tokens: int) -> None:
        """A client that drops its stream."""
        body, events = self.body(tokens, stream=True), self.rng.randrange(1, 20)
        with contextlib.suppress(httpx.TransportError):
            async with self.client.stream("POST", "/v1/completions", json=body) as answer:
                self.counts[f"leaving: {answer.status_code}"] += 1
                async for _ in answer.aiter_lines():
                    if (events := events - 1) <= 0:
                        return

    async def hostile(self) -> None:
        kind = self.rng.choice((self._malformed, self._oversized, self._slow_headers, self._slow_body, self._garbage))
        name = kind.__name__.strip("_")
        try:
            status = await asyncio.wait_for(kind(), 120)
        except (httpx.TransportError, OSError, asyncio.IncompleteReadError):
            status = "closed"
        self.counts[f"{name}: {status}"] += 1

    async def _malformed(self) -> int:
        good = json.dumps(self.body(5)).encode()
        cut = self.rng.randrange(len(good))
        body = self.rng.choice((
            good[:cut], good[:cut] + bytes([self.rng.randrange(256)]) + good[cut:], b"[" * 50_000, b"\xff" * 100,
            good.replace(b'"max_tokens": 5', b'"max_tokens": ' + b"9" * 400), good.replace(b"5", b"NaN"),
            json.dumps({"model": "real", "prompt": [[1, -7]], "n": 10**9}).encode(),
        ))  # fmt: skip
        return (await self.client.post("/v1/completions", content=body, headers=JSON)).status_code

    async def _oversized(self) -> int:
        async def endless() -> Any:
            for _ in range(64):
                yield b"x" * (1 << 16)

        if self.rng.random() < 0.5:
            return (await self.client.post("/v1/completions", content=endless(), headers=JSON)).status_code
        body = {**self.body(5), "prompt": "word " * 250_000}
        return (await self.client.post("/v1/completions", json=body)).status_code

    async def _slow_headers(self) -> str:
        return await self._drip(HEAD + b"x-slow: " + b"a" * 200, 0.2)

    async def _slow_body(self) -> str:
        return await self._drip(HEAD + b"content-length: 5000\r\n\r\n" + b"x" * 200, 0.5)

    async def _garbage(self) -> str:
        return await self._drip(bytes(self.rng.randrange(256) for _ in range(300)), 0.0)

    async def _drip(self, data: bytes, pause: float) -> str:
        """Byte by byte, until the server has enough of it."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            for at in range(len(data)):
                writer.write(data[at : at + 1])
                await writer.drain()
                await asyncio.sleep(pause)
                if reader.at_eof():
                    break
            found = await reader.read(200)
            return found.split(b" ")[1].decode() if found.startswith(b"HTTP/") else "closed"
        finally:
            writer.close()

    async def polite(self, expected: dict[str, str], ends: float) -> list[float]:
        """Asks one question after another, and comes again when it is told to. Seconds until each answer."""
        seconds = []
        while time.monotonic() < ends:
            prompt, began = self.rng.choice(list(expected)), time.monotonic()
            while True:
                answer = await self.client.post("/v1/completions", json=polite_body(prompt))
                if answer.status_code != 429:
                    break
                self.counts["polite: 429"] += 1
                await asyncio.sleep(self.rng.uniform(0.2, 1.0) * min(2, int(answer.headers["retry-after"])))
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected[prompt]
            self.counts["polite: 200"] += 1
            seconds.append(time.monotonic() - began)
        return seconds


JSON = {"content-type": "application/json"}


def polite_body(prompt: str) -> dict[str, Any]:
    return {"model": "real", "prompt": prompt, "max_tokens": 8, "temperature": 0}


def memory(process: psutil.Process) -> int:
    """Of the server and its engine."""
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


async def measure_capacity(load: Load, tokens: int) -> float:
    """Requests a second that the server completes with as many clients as it has rows: the best of three rounds, since
    other programs may hold up one."""
    await asyncio.gather(*(load.ask(tokens) for _ in range(ROWS)))
    best = 0.0

    async def one() -> None:
        for _ in range(6):
            assert await load.ask(tokens) == 200

    for _ in range(3):
        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(ROWS)))
        best = max(best, 6 * ROWS / (time.monotonic() - began))
    return best


async def overload(load: Load, process: psutil.Process, tokens: int, minutes: float) -> dict[str, Any]:
    prompts = [f"{words}{at}" for at, words in enumerate(WORDS)]
    answers = [await load.client.post("/v1/completions", json=polite_body(prompt)) for prompt in prompts]
    expected = {prompt: one.json()["choices"][0]["text"] for prompt, one in zip(prompts, answers, strict=True)}
    capacity = await measure_capacity(load, tokens)
    load.counts.clear()
    ends, samples = time.monotonic() + 60 * minutes, [memory(process)]
    running: set[asyncio.Task[Any]] = set()

    def start(work: Any) -> None:
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[Any]) -> None:
        running.discard(task)
        load.counts["started"] += 1
        if task.exception() is not None:
            load.counts[f"Error: {task.exception()!r}"] += 1

    async def arrivals(rate: float, make: Any, least: int = 0) -> None:
        while time.monotonic() < ends or least > 0:
            least -= 1
            start(make())
            await asyncio.sleep(load.rng.expovariate(rate))

    async def watch() -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(2)
            samples.append(memory(process))

    polite, *_ = await asyncio.gather(
        load.polite(expected, ends), arrivals(10 * capacity, lambda: load.ask(tokens)),
        arrivals(capacity, lambda: load.leave(tokens)),
        arrivals(1.25 * HOSTILE / (60 * minutes), load.hostile, HOSTILE), watch(),
    )  # fmt: skip
    await asyncio.gather(*running, return_exceptions=True)
    samples.append(memory(process))
    return {"capacity": capacity, "samples": samples, "polite": sorted(polite)}


def test_ten_times_the_load_among_hostile_clients(tiny) -> None:
    real = os.environ.get("SOJOURN_REAL_MODEL", "")
    model, tokens = (real, 24) if real else (str(long_base(tiny.base)), 200)
    limits = ["--max-requests", str(ROWS), "--max-waiting", str(WAITING), "--max-body-mb", "1", "--device", "cpu"]
    command = Command(model, *limits, "--max-length", "512", "--feedback", "off")
    try:
        load = Load(command.url.removesuffix("/v1"), seed=1)
        process = psutil.Process(command.process.pid)
        found = asyncio.run(overload(load, process, tokens, MINUTES))
        samples, polite = found["samples"], found["polite"]
        early = max(samples[: max(2, len(samples) // 4)])
        report(found, load.counts, early)
        assert command.process.poll() is None
        health = httpx.get(load.url + "/health")
        assert health.status_code == 200, health.text
        events = [json.loads(line) for line in command.lines if line.startswith("{")]
        bad = [one for one in events if one["event"] in ("internal_error", "server", "engine_died")]
        assert not bad, bad[:3]
        assert not [one for one in events if one.get("status", 0) >= 500], "a 5xx"
        assert not [name for name in load.counts if "Error" in name], load.counts
        assert load.counts["overload: 429"] > load.counts["overload: 200"] > 0
        assert len(polite) > MINUTES and share(load.counts, "polite") > share(load.counts, "overload") / 2
        assert samples[-1] < early + GROWTH
        metrics = httpx.get(load.url + "/metrics").text
        assert "sojourn_sequences 0" in metrics and 'engine_running{model="real"} 0' in metrics
        command.process.terminate()
        assert command.process.wait(60) == 0
    finally:
        command.process.kill()


def share(counts: Counter[str], who: str) -> float:
    """Of requests that were answered."""
    return counts[f"{who}: 200"] / (counts[f"{who}: 200"] + counts[f"{who}: 429"])


def report(found: dict[str, Any], counts: Counter[str], early: int) -> None:
    samples, polite = [one / 2**20 for one in found["samples"]], found["polite"]
    print(f"\ncapacity {found['capacity']:.1f} requests/s, {MINUTES:g} minutes at ten times that")
    print(
        f"memory in MiB: start {samples[0]:.0f}, most of the first quarter {early / 2**20:.0f}, end {samples[-1]:.0f}"
    )
    middle = polite[len(polite) // 2] if polite else 0.0
    print(f"polite client: {len(polite)} answers, {middle:.2f} s each (median), at most {polite[-1]:.2f} s")
    for name, count in sorted(counts.items()):
        print(f"  {count:>7,}  {name}")
