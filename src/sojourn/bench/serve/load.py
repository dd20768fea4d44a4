"""Load on an OpenAI-compatible server, and what its clients saw.

Closed loop: so many clients, each sends its next request when it has the answer. Open loop: requests arrive at a rate
(Poisson), whatever the server has to do.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sojourn.bench.serve.client import Address, Sent, post

# Tokens of prompts (with a chat template) and of answers in instruction data, from the 5th to the 95th percentile
_PROMPT_TOKENS = (27, 29, 31, 32, 33, 35, 38, 41, 47, 62)
_ANSWER_TOKENS = (8, 14, 25, 47, 84, 128, 188, 259, 320, 401)


@dataclass(frozen=True)
class Asked:
    """A request: prompt ids, and how many tokens to generate."""

    prompt: tuple[int, ...]
    tokens: int


@dataclass
class Seen:
    """Times of one request, in seconds. `gaps`: between tokens."""

    first: float = 0.0
    total: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None


def make_requests(ids: Sequence[int], count: int, lengths: str, seed: int = 0) -> list[Asked]:
    """`lengths`: PROMPTxNEW tokens (128x128), or `chat` for those of instruction data. Prompts are pieces of `ids`."""
    rng = random.Random(seed)  # noqa: S311
    asked = []
    for _ in range(count):
        if lengths == "chat":
            prompt, new = rng.choice(_PROMPT_TOKENS), rng.choice(_ANSWER_TOKENS)
        else:
            prompt, new = (int(part) for part in lengths.split("x"))
        start = rng.randrange(len(ids))
        asked.append(Asked(tuple(ids[(start + at) % len(ids)] for at in range(prompt)), new))
    return asked


async def closed_loop(server: Address, model: str, asked: Sequence[Asked], clients: int) -> tuple[list[Seen], float]:
    """What each request saw, and seconds in all."""
    waiting = iter(asked)
    sent: list[Seen | Sent] = []

    async def work() -> None:
        for request in waiting:
            sent.append(await _send(server, model, request))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    seconds = time.perf_counter() - began
    return [_read(one) for one in sent], seconds


async def open_loop(
    server: Address, model: str, asked: Sequence[Asked], rate: float, seed: int = 0
) -> tuple[list[Seen], float]:
    rng = random.Random(seed)  # noqa: S311
    began = time.perf_counter()
    tasks = []
    for request in asked:
        tasks.append(asyncio.create_task(_send(server, model, request)))
        await asyncio.sleep(rng.expovariate(rate))
    sent = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - began
    return [_read(one) for one in sent], seconds


async def _send(server: Address, model: str, asked: Asked) -> Seen | Sent:
    body = {
        "model": model, "prompt": list(asked.prompt), "max_tokens": asked.tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    try:
        return await post(server, "/v1/completions", body)
    except (OSError, asyncio.TimeoutError) as error:
        return Seen(error=f"{type(error).__name__}: {error}"[:200])


def _read(sent: Seen | Sent) -> Seen:
    """What a client saw, when the load is over."""
    if isinstance(sent, Seen):
        return sent
    answer = sent.read()
    seen = Seen(total=answer.seconds)
    if answer.status != 200:
        seen.error = f"{answer.status}: {answer.body.decode(errors='replace')[:200]}"
    else:
        read_events(seen, answer.pieces)
    return seen


def read_events(seen: Seen, pieces: Sequence[tuple[float, bytes]]) -> None:
    """Tokens and times of a stream: an event has come when its end has."""
    last, rest = 0.0, b""
    for came, data in pieces:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            chunk = json.loads(event[6:])
            if "error" in chunk:
                seen.error = str(chunk["error"])[:200]
            if usage := chunk.get("usage"):
                seen.tokens = usage["completion_tokens"]
            if not chunk.get("choices"):
                continue
            if not seen.first:
                seen.first = came
            else:
                seen.gaps.append(came - last)
            last = came


def summarize(seen: Sequence[Seen], seconds: float) -> dict[str, Any]:
    """Throughput, time to first token (TTFT) and inter-token latency (ITL) with their 50th, 90th, 99th percentiles."""
    good = [one for one in seen if one.error is None]
    row: dict[str, Any] = {
        "requests": len(seen),
        "errors": len(seen) - len(good),
        "tokens_per_second": round(sum(one.tokens for one in good) / seconds, 1),
        "seconds": round(seconds, 2),
    }
    if len(good) < len(seen):
        row["first_error"] = next(one.error for one in seen if one.error)
    gaps = [gap for one in good for gap in one.gaps]
    for name, values in (("ttft_ms", [one.first for one in good]), ("itl_ms", gaps)):
        row[name] = {f"p{share}": round(1000 * _percentile(values, share), 2) for share in (50, 90, 99)}
    return row


def _percentile(values: Sequence[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)] if ordered else 0.0
