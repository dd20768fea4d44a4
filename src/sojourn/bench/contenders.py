"""The contenders that prepare the same chats: ours, the bare tokenizer as a floor, and `datasets.map` as a peer.

Each runs in a fresh process. The peer loads, renders, tokenises, masks and packs as trl does it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROW_LENGTH = 2048
BATCH = 1000
_FLOOR_BYTES = 300_000_000  # its rate does not change after this
_MARKS = re.compile(r"\{%-?\s*generation\b")


def contend() -> None:
    """The process of one contender."""
    role, task = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    row = {"sojourn": _ours, "tokenizer": _floor, "datasets": _peer}[role](task)
    row["cpu_seconds"] = round(sum(os.times()[:4]), 2)  # with imports, and of all processes that it waited for
    Path(task["out"]).write_text(json.dumps(row), encoding="utf-8")


def words_of(corpus: str, tokenizer: str, workers: int) -> list[str]:
    """The preparation as one would type it."""
    return [
        "small", f"data.sources={corpus}", f"data.tokenizer={tokenizer}", f"data.max_length={ROW_LENGTH}",
        f"data.workers={workers}", "data.eval_fraction=0.01",
    ]  # fmt: skip


def _ours(task: dict[str, Any]) -> Row:
    from sojourn.config.load import load_run
    from sojourn.data.inputs import data_settings
    from sojourn.data.prepare import prepare
    from sojourn.run.home import prepared_folder

    data = data_settings(load_run(words_of(task["corpus"], task["tokenizer"], task["workers"])).config)
    began = time.perf_counter()
    artefact = prepare(data, prepared_folder())
    seconds = time.perf_counter() - began
    report = artefact.report
    splits = (report["train"], report["eval"])
    sums = {key: sum(split[key] for split in splits) for key in ("documents", "tokens", "trained_tokens", "rows")}
    cut = sum(split["truncated_chats"] + split["dropped_chats"] for split in splits)
    return {
        "seconds": seconds, **sums, "records": report["records"], "cut": cut, "fill": report["train"]["fill"],
        "path": str(artefact.path),
    }  # fmt: skip


def _floor(task: dict[str, Any]) -> Row:
    """Rendering and counting stand between the timed calls, and so does the freeing of what a call returned."""
    from sojourn.data.tokenize.tokenizer import open_tokenizer

    words = open_tokenizer(task["tokenizer"])
    tokenizer, template = words.tokenizer, words.template("auto")
    size = min(Path(task["corpus"]).stat().st_size, _FLOOR_BYTES)
    texts = (template.text(chat) for chat in chats_of(Path(task["corpus"]), size))
    seconds, documents, tokens = 0.0, 0, 0
    while batch := list(islice(texts, BATCH)):
        began = time.perf_counter()
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - began
        documents += len(batch)
        tokens += sum(map(len, encodings))
        del encodings
    return {"seconds": seconds, "documents": documents, "tokens": tokens, "bytes": size}


def chats_of(corpus: Path, size: int) -> Iterator[tuple[Any, ...]]:
    """The chats in the first `size` bytes."""
    from sojourn.data.sources.document import Message

    read = 0
    with corpus.open("rb") as file:
        for raw in file:
            read += len(raw)
            if read > size:
                return
            yield tuple(Message(turn["role"], turn["content"]) for turn in json.loads(raw)["messages"])


def _peer(task: dict[str, Any]) -> Row:
    import datasets
    import pyarrow.compute as pc
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    integers = {"input_ids": datasets.Value("int32"), "assistant_masks": datasets.Value("int8")}
    features = datasets.Features({name: datasets.List(kind) for name, kind in integers.items()})
    packed_features = datasets.Features({**features, "seq_lengths": datasets.List(datasets.Value("int32"))})
    shared = {"batched": True, "batch_size": BATCH, "num_proc": task["workers"] if task["workers"] > 1 else None}
    marks = {} if _MARKS.search(tokenizer.chat_template) else {"around": _around(tokenizer)}
    began = time.perf_counter()
    chats = datasets.load_dataset("json", data_files=task["corpus"], split="train", cache_dir=task["cache"])
    encoded = chats.map(
        encode_batch, fn_kwargs={"tokenizer": tokenizer, **marks}, remove_columns=chats.column_names, features=features,
        **shared,
    )  # fmt: skip
    packed = encoded.with_format("arrow").map(pack_batch, features=packed_features, **shared)
    seconds = time.perf_counter() - began
    tokens = trained = 0
    for table in packed.iter(BATCH):
        tokens += pc.sum(pc.list_value_length(table["input_ids"])).as_py()
        trained += pc.sum(pc.list_flatten(table["assistant_masks"])).as_py()
    return {
        "seconds": seconds, "documents": len(encoded), "tokens": tokens, "trained_tokens": trained, "rows": len(packed),
        "fill": round(tokens / (len(packed) * ROW_LENGTH), 4), "records": len(chats),
    }  # fmt: skip


def _around(tokenizer: Any) -> tuple[str, str]:
    """What a template without generation marks writes before the assistant's words, and the token that ends them."""
    turns = [{"role": "user", "content": "a"}]
    asked, prompted = (tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=p) for p in (0, 1))
    answered = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "b"}], tokenize=False)
    tail = answered[len(prompted) + 1 :]
    ends = [token for token in tokenizer.get_added_vocab() if tail.startswith(token)]
    return prompted[len(asked) :], max(ends, key=len)


def encode_batch(batch: dict[str, Any], tokenizer: Any, around: tuple[str, str] | None = None) -> dict[str, Any]:
    """Ids and mask of chats; those of which nothing is trained on after cutting are left out, as we do."""
    cut = {"truncation": True, "max_length": ROW_LENGTH}
    if around is None:
        found = tokenizer.apply_chat_template(
            batch["messages"], return_dict=True, return_assistant_tokens_mask=True, **cut
        )
        ids, masks = found["input_ids"], found["assistant_masks"]
    else:
        texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, **cut)
        ids = found["input_ids"]
        masks = [_mask(found, number, text, *around) for number, text in enumerate(texts)]
    kept = [number for number, mask in enumerate(masks) if 1 in mask]
    return {"input_ids": [ids[one] for one in kept], "assistant_masks": [masks[one] for one in kept]}


def _mask(found: Any, number: int, text: str, before: str, end: str) -> list[int]:
    mask = [0] * len(found["input_ids"][number])
    place = text.find(before)
    while place >= 0:
        start, stop = place + len(before), text.index(end, place + len(before))
        first = found.char_to_token(number, start)
        if first is None:  # cut off
            break
        last = found.char_to_token(number, stop)
        last = len(mask) - 1 if last is None else last
        mask[first : last + 1] = [1] * (last + 1 - first)
        place = text.find(before, stop)
    return mask


def pack_batch(table: Any) -> Any:
    """Rows by best fit of whole documents, long ones first, without leaving Arrow: trl's `bfd`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(table["input_ids"]).to_numpy()
    rows = _best_fit(lengths.tolist())
    order = np.array([document for row in rows for document in row])
    counts = np.array([len(row) for row in rows])
    documents = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int32)[documents]
    taken = table.take(order)
    columns = {
        name: pa.ListArray.from_arrays(tokens, pc.list_flatten(taken[name]).combine_chunks())
        for name in ("input_ids", "assistant_masks")
    }
    sequences = pa.ListArray.from_arrays(documents, pa.array(lengths[order].astype(np.int32)))
    return pa.table({**columns, "seq_lengths": sequences})


def _best_fit(lengths: list[int]) -> list[list[int]]:
    from bisect import bisect_left, insort

    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect_left(rooms, (lengths[document], -1))
        if place == len(rooms):
            room, row = ROW_LENGTH, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(document)
        insort(rooms, (room - lengths[document], row))
    return rows
