"""`sojourn bench serve`: the load it makes, and what its table says."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from conftest import sojourn
from serve_engine import ThreadEngine, long_base, serving
from sojourn.bench.serve.client import Address
from sojourn.bench.serve.load import Seen, closed_loop, make_requests, open_loop, read_events, summarize
from sojourn.bench.serve.measure import make_bench
from sojourn.errors import UserError
from sojourn.infer.load import load_model


def test_requests_have_the_lengths_asked_for_and_depend_on_the_seed_alone() -> None:
    fixed = make_requests(range(3, 60), 20, "128x7")
    assert {(len(one.prompt), one.tokens) for one in fixed} == {(128, 7)} and fixed == make_requests(
        range(3, 60), 20, "128x7"
    )
    chat = make_requests(range(3, 5000), 200, "chat")
    assert len({one.tokens for one in chat}) == 10 and 27 <= min(len(one.prompt) for one in chat) < 62


def test_the_summary_counts_what_clients_saw() -> None:
    seen = [Seen(0.1, 1.0, 10, [0.1] * 9), Seen(0.3, 2.0, 30, [0.05] * 28 + [0.4]), Seen(error="429: full")]
    row = summarize(seen, 4.0)
    assert (row["requests"], row["errors"], row["tokens_per_second"], row["first_error"]) == (3, 1, 10.0, "429: full")
    assert row["ttft_ms"] == {"p50": 300.0, "p90": 300.0, "p99": 300.0}
    assert row["itl_ms"] == {"p50": 50.0, "p90": 100.0, "p99": 400.0}


def test_an_event_has_come_when_its_end_has_and_an_error_in_a_stream_is_one() -> None:
    seen, failed = Seen(), Seen()
    pieces = [
        (1.0, b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choi'), (2.0, b'ces":[{"text":"b"}]}\n'), (3.5, b"\n"),
        (4.0, b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'),
    ]  # fmt: skip
    read_events(seen, pieces)
    assert (seen.first, seen.gaps, seen.tokens, seen.error) == (1.0, [2.5], 2, None)
    read_events(failed, [(1.0, b'data: {"error":{"message":"the engine stopped"}}\n\n')])
    assert "the engine stopped" in str(failed.error)


@pytest.mark.parametrize("wrong", [{"lengths": "12by4"}, {"lengths": "0x4"}, {"clients": "0"}, {"clients": "one"}])
def test_wrong_options_are_named(wrong: dict[str, str]) -> None:
    given = {"clients": "1", "lengths": "8x8", **wrong}
    with pytest.raises(UserError, match=f"--{next(iter(wrong))} "):
        make_bench("m", given["clients"], None, None, given["lengths"], "cpu", False, [])


def test_both_loops_measure_a_real_server(tiny) -> None:
    loaded = load_model(str(long_base(tiny.base)), "cpu")
    asked = make_requests(loaded.tokenizer("the cat sat on the mat " * 40)["input_ids"], 5, "8x6")
    with serving(ThreadEngine(loaded)) as served:

        async def both() -> list[tuple[list[Seen], float]]:
            server = Address(int(served.url.rpartition(":")[2]))
            return [await closed_loop(server, "tiny", asked, 2), await open_loop(server, "tiny", asked, 50.0)]

        began = time.perf_counter()
        for seen, seconds in asyncio.run(both()):
            row = summarize(seen, seconds)
            assert row["errors"] == 0, row
            assert [one.tokens for one in seen] == [6] * 5 and 0 < row["ttft_ms"]["p50"] / 1000 < seconds
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(30, rel=0.05)
        assert time.perf_counter() - began >= row["seconds"]
        server = Address(int(served.url.rpartition(":")[2]))
        refused, _ = asyncio.run(closed_loop(server, "another", asked[:1], 1))
        assert "404" in str(refused[0].error)
    gone, _ = asyncio.run(closed_loop(server, "tiny", asked[:1], 1))
    assert "ConnectionRefusedError" in str(gone[0].error)


@pytest.mark.slow  # a server of its own, and transformers beside it
def test_the_command_prints_a_row_for_each_engine(tiny) -> None:
    out = tiny.home / "bench.json"
    args = ["bench", "serve", str(long_base(tiny.base)), "--clients", "1,3", "--lengths", "8x6", "--device", "cpu"]
    done = sojourn(*args, "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["engine"], row["load"]) for row in rows[:3]] == [
        ("sojourn", "1"),
        ("sojourn", "3"),
        ("transformers", "1 by 1"),
    ]
    assert all(row["errors"] == 0 and row["tokens_per_second"] > 0 for row in rows)
    assert "llama.cpp: not measured: it opens GGUF files only" in done.stdout
