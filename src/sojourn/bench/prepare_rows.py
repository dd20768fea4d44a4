"""The rows of `sojourn bench prepare`: our preparation, the bare tokenizer as a lower bound, `datasets.map` as a peer.

Each runs in its own process on the same chats.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sojourn.bench.prepare_settings import BATCH, ROW_LENGTH, Row

_TOKENIZER_BYTES = 300_000_000  # its speed does not change after this


def main() -> None:
    """Entry point of one row's process: argv is its name and the file of its task."""
    name, task = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    row = (_sojourn if name == "sojourn" else _tokenizer if name == "tokenizer" else _datasets)(task)
    row["cpu_seconds"] = round(sum(os.times()[:4]), 2)  # imports and finished child processes included
    Path(task["out"]).write_text(json.dumps(row), encoding="utf-8")


def prepare_args(corpus: str, tokenizer: str, workers: int) -> list[str]:
    """The arguments of `sojourn prepare`."""
    return [
        "small", f"data.sources={corpus}", f"data.tokenizer={tokenizer}", f"data.max_length={ROW_LENGTH}",
        f"data.workers={workers}", "data.eval_fraction=0.01",
    ]  # fmt: skip


def _sojourn(task: dict[str, Any]) -> Row:
    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare_run
    from sojourn.run.home import prepared_folder

    config = load_run(prepare_args(task["corpus"], task["tokenizer"], task["workers"])).config
    began = time.perf_counter()
    artefact = prepare_run(config, prepared_folder())
    seconds = time.perf_counter() - began
    report = artefact.report
    splits = (report["train"], report["eval"])
    sums = {key: sum(split[key] for split in splits) for key in ("documents", "tokens", "trained_tokens", "rows")}
    truncated = sum(split["truncated_chats"] + split["dropped_chats"] for split in splits)
    return {
        "seconds": seconds, **sums, "records": report["records"], "truncated": truncated,
        "fill": report["train"]["fill"], "path": str(artefact.path),
    }  # fmt: skip


def _tokenizer(task: dict[str, Any]) -> Row:
    """`encode_batch_fast` alone: rendering, counting and freeing are not timed."""
    from sojourn.data.tokenize.tokenizer import open_tokenizer

    bundle = open_tokenizer(task["tokenizer"])
    tokenizer, template = bundle.tokenizer, bundle.template("auto")
    size = min(Path(task["corpus"]).stat().st_size, _TOKENIZER_BYTES)
    texts = (template.text(chat) for chat in read_chats(Path(task["corpus"]), size))
    seconds, documents, tokens = 0.0, 0, 0
    while batch := list(islice(texts, BATCH)):
        began = time.perf_counter()
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - began
        documents += len(batch)
        tokens += sum(map(len, encodings))
        del encodings
    return {"seconds": seconds, "documents": documents, "tokens": tokens, "bytes": size}


def read_chats(corpus: Path, size: int) -> Iterator[tuple[Any, ...]]:
    """The chats in the first `size` bytes."""
    from sojourn.data.sources.document import Message

    read = 0
    with corpus.open("rb") as file:
        for raw in file:
            read += len(raw)
            if read > size:
                return
            yield tuple(Message(turn["role"], turn["content"]) for turn in json.loads(raw)["messages"])


def _datasets(task: dict[str, Any]) -> Row:
    from sojourn.bench.peers import require_peers

    return dict(require_peers().prepare_with_datasets(task))
