"""Peer of `sojourn bench prepare`: load, render, tokenise, mask and pack with `datasets.map`, as TRL does it."""

from __future__ import annotations

import re
import time
from typing import Any

from sojourn.bench.prepare_settings import BATCH, ROW_LENGTH, Row

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


def prepare_with_datasets(task: dict[str, Any]) -> Row:
    import datasets
    import pyarrow.compute as pc
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    integers = {"input_ids": datasets.Value("int32"), "assistant_masks": datasets.Value("int8")}
    features = datasets.Features({name: datasets.List(kind) for name, kind in integers.items()})
    packed_features = datasets.Features({**features, "seq_lengths": datasets.List(datasets.Value("int32"))})
    shared = {"batched": True, "batch_size": BATCH, "num_proc": task["workers"] if task["workers"] > 1 else None}
    spans = {} if _GENERATION_TAG.search(tokenizer.chat_template) else {"delimiters": _assistant_delimiters(tokenizer)}
    began = time.perf_counter()
    chats = datasets.load_dataset("json", data_files=task["corpus"], split="train", cache_dir=task["cache"])
    encoded = chats.map(
        encode_batch, fn_kwargs={"tokenizer": tokenizer, **spans}, remove_columns=chats.column_names, features=features,
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


def _assistant_delimiters(tokenizer: Any) -> tuple[str, str]:
    """For templates without generation tags: what stands before an assistant message, and the token that ends it."""
    turns = [{"role": "user", "content": "a"}]
    user_only, prompt = (tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=p) for p in (0, 1))
    chat = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "b"}], tokenize=False)
    tail = chat[len(prompt) + 1 :]
    ends = [token for token in tokenizer.get_added_vocab() if tail.startswith(token)]
    return prompt[len(user_only) :], max(ends, key=len)


def encode_batch(batch: dict[str, Any], tokenizer: Any, delimiters: tuple[str, str] | None = None) -> dict[str, Any]:
    """Token ids and assistant masks; a chat without a target token after truncation is left out, as in our own."""
    truncation = {"truncation": True, "max_length": ROW_LENGTH}
    if delimiters is None:
        encoded = tokenizer.apply_chat_template(
            batch["messages"], return_dict=True, return_assistant_tokens_mask=True, **truncation
        )
        ids, masks = encoded["input_ids"], encoded["assistant_masks"]
    else:
        texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, **truncation)
        ids = encoded["input_ids"]
        masks = [_mask(encoded, index, text, *delimiters) for index, text in enumerate(texts)]
    trained = [index for index, mask in enumerate(masks) if 1 in mask]
    return {"input_ids": [ids[i] for i in trained], "assistant_masks": [masks[i] for i in trained]}


def _mask(encoded: Any, index: int, text: str, before: str, end: str) -> list[int]:
    mask = [0] * len(encoded["input_ids"][index])
    position = text.find(before)
    while position >= 0:
        start, stop = position + len(before), text.index(end, position + len(before))
        first = encoded.char_to_token(index, start)
        if first is None:  # truncated
            break
        last = encoded.char_to_token(index, stop)
        last = len(mask) - 1 if last is None else last
        mask[first : last + 1] = [1] * (last + 1 - first)
        position = text.find(before, stop)
    return mask


def pack_batch(table: Any) -> Any:
    """Best-fit decreasing packing of whole documents, in Arrow: TRL's `bfd`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.list_value_length(table["input_ids"]).to_numpy()
    rows = best_fit(lengths.tolist())
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


def best_fit(lengths: list[int]) -> list[list[int]]:
    """The documents of each row of ROW_LENGTH tokens."""
    from bisect import bisect_left, insort

    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left, row
    for document in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        index = bisect_left(free, (lengths[document], -1))
        if index == len(free):
            left, row = ROW_LENGTH, len(rows)
            rows.append([])
        else:
            left, row = free.pop(index)
        rows[row].append(document)
        insort(free, (left - lengths[document], row))
    return rows
