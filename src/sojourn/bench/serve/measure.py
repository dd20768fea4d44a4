"""`sojourn bench serve`: one table of our engine and the peers that are installed, on the same requests in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sojourn.bench.serve.client import Address
from sojourn.bench.serve.load import Asked, Seen, closed_loop, make_requests, open_loop, summarize
from sojourn.bench.serve.servers import our_server, transformers_rows, vllm_server
from sojourn.errors import RunFailed, UserError
from sojourn.estimate.serving import MAX_ROWS

_REQUESTS_PER_CLIENT = 3
_MOST_SEQUENTIAL = 8  # requests of a peer that answers one by one


@dataclass(frozen=True)
class ServeBench:
    """`clients`: numbers of them in a closed loop. `rate`: requests a second, for an open loop instead. `lengths`: see
    `make_requests`. `arguments`: further ones of `sojourn serve`."""

    model: str
    clients: tuple[int, ...]
    rate: float | None
    requests: int | None
    lengths: str
    device: str
    peers: bool
    arguments: tuple[str, ...]


def make_bench(
    model: str, clients: str, rate: float | None, requests: int | None, lengths: str, device: str, peers: bool,
    arguments: list[str],
) -> ServeBench:  # fmt: skip
    parts = lengths.split("x")
    if lengths != "chat" and not (len(parts) == 2 and all(part.isdigit() and int(part) > 0 for part in parts)):
        raise UserError(f"--lengths {lengths}: expected chat, or tokens of prompt and answer, such as 128x128")
    try:
        counts = tuple(int(one) for one in clients.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UserError(f"--clients {clients}: expected numbers, separated by commas, such as 1,32")
    return ServeBench(model, counts, rate, requests, lengths, device, peers, tuple(arguments))


def measure(bench: ServeBench, echo: Callable[[str], None]) -> dict[str, Any]:
    from sojourn.infer.find import find_model
    from sojourn.infer.load import tokenizer_of

    found = find_model(bench.model)
    ids = _text_ids(tokenizer_of(found))
    result: dict[str, Any] = {"model": bench.model, "lengths": bench.lengths, "rows": []}

    def add(engine: str, load: str, row: dict[str, Any]) -> None:
        result["rows"].append({"engine": engine, "load": load, **row})
        echo(_line(result["rows"][-1]))

    echo(HEADER)
    limits = ["--device", bench.device, "--max-requests", str(max(MAX_ROWS, *bench.clients))]
    ours = our_server(bench.model, ["--engine", "builtin", *limits, *bench.arguments])
    is_gguf = found.path.suffix == ".gguf"
    with _said(echo, "sojourn") if is_gguf and bench.peers else nullcontext(), ours as server:
        asyncio.run(_loads(bench, server, ids, partial(add, "sojourn")))
    if not bench.peers:
        return result
    few = make_requests(ids, _MOST_SEQUENTIAL, bench.lengths)
    with _said(echo, "transformers"):
        answers, seconds = transformers_rows(bench.model, bench.device, few)
        seen = [Seen(one["first"], one["total"], one["tokens"], _gaps(one)) for one in answers]
        add("transformers", "1 by 1", summarize(seen, seconds))
    with _said(echo, "vLLM"), vllm_server(_plain_folder(found.path), _longest(few, bench)) as server:
        asyncio.run(_loads(bench, server, ids, partial(add, "vLLM")))
    with _said(echo, "llama.cpp"):
        if not is_gguf:
            raise UserError("it opens GGUF files only; export first: sojourn export MODEL --to gguf")
        with our_server(bench.model, ["--engine", "llamacpp", *limits]) as server:
            asyncio.run(_loads(bench, server, ids, partial(add, "llama.cpp")))
    return result


async def _loads(
    bench: ServeBench, server: Address, ids: list[int], add: Callable[[str, dict[str, Any]], None]
) -> None:
    await closed_loop(server, "model", make_requests(ids, 2, "16x4", seed=1), 2)  # warm-up
    if bench.rate is not None:
        asked = make_requests(ids, bench.requests or 100, bench.lengths)
        add(f"{bench.rate:g}/s", summarize(*await open_loop(server, "model", asked, bench.rate)))
        return
    for clients in bench.clients:
        asked = make_requests(ids, bench.requests or max(4, clients * _REQUESTS_PER_CLIENT), bench.lengths)
        add(str(clients), summarize(*await closed_loop(server, "model", asked, clients)))


@contextmanager
def _said(echo: Callable[[str], None], name: str) -> Iterator[None]:
    """A peer that does not run is a line, not the end."""
    try:
        yield
    except (UserError, RunFailed, OSError) as error:
        echo(f"{name}: not measured: {error}")


def _gaps(row: dict[str, Any]) -> list[float]:
    """transformers' streamer is called once a token; its mean gap stands for all."""
    return [(row["total"] - row["first"]) / max(1, row["tokens"] - 1)] * (row["tokens"] - 1)


def _plain_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise UserError("it opens folders of whole models only; export first: sojourn export MODEL --to vllm")
    return path


def _longest(asked: list[Asked], bench: ServeBench) -> int:
    return 512 if bench.lengths == "chat" else max(len(one.prompt) + one.tokens for one in asked) + 16


def _text_ids(tokenizer: Any) -> list[int]:
    from sojourn.data import builtin

    text = "\n\n".join(one.text for one in builtin.text(200_000, languages=("en",)))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


HEADER = f"{'engine':14}{'clients':>8}{'tok/s':>10}{'TTFT p50':>11}{'p90':>9}{'p99':>9}{'ITL p50':>11}" + (
    f"{'p90':>9}{'p99':>9}  errors"
)


def _line(row: dict[str, Any]) -> str:
    first, gaps = row["ttft_ms"], row["itl_ms"]
    cells = "".join(f"{value:>{width}.1f}" for value, width in zip(first.values(), (11, 9, 9), strict=True))
    cells += "".join(f"{value:>{width}.2f}" for value, width in zip(gaps.values(), (11, 9, 9), strict=True))
    reason = f" ({row['first_error']})" if row["errors"] else ""
    return f"{row['engine']:14}{row['load']:>8}{row['tokens_per_second']:>10,.1f}{cells}  {row['errors']}{reason}"
