"""What a case stands on: its configuration, its rows, and a base of zeros that take no room on the disk.

FOLDER/
  bases/SHAPE/      config.json, and a safetensors file whose body is a hole
  words/            a tokenizer of a few bytes, as none of this is ever text
  home/             prepared/ with the rows, runs/
  compiled/         what torch compiled
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.planner.cases import Case, shape_of, sizes
from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import RunConfig

_POSITIONS = 32_768
_END = "<|endoftext|>"


def settings_of(case: Case, device: str, folder: Path) -> RunConfig:
    """The run as a user would write it, with nothing left to chance."""
    shape = shape_of(case)
    method: dict[str, Any] = {"kind": case.method}
    if case.method in ("lora", "qlora"):
        method |= {"rank": case.rank, "dropout": case.dropout, "targets": list(case.targets)}
    model: dict[str, Any] = {"base": str(folder / "bases" / shape.name)}
    data: dict[str, Any] = {"tokenizer": str(folder / "words")}
    if case.new:
        model = {"d_model": shape.hidden, "num_layers": shape.layers, "num_heads": shape.heads,
                 "num_kv_heads": shape.kv_heads, "ffn_size": shape.ffn, "tie_embeddings": shape.tied}  # fmt: skip
        data = {"vocab_size": shape.vocab}
    data |= {
        "sources": [str(folder / "sources" / f"{case.name}.txt")], "max_length": case.length, "eval_fraction": 0,
        "packing": "packed" if case.filled == 1 else "padded",
    }  # fmt: skip
    train = {
        "steps": 100, "global_batch": case.rows * case.passes, "micro_batch": case.rows, "optimizer": case.optimizer,
        "lr": 1e-5, "warmup": 0, "schedule": "constant", "activation_checkpointing": case.checkpointing,
        "offload": case.offload, "fp8": "on" if case.fp8 else "off", "cuda_graphs": case.graphs, "device": device,
        "compile": "on" if case.compiled else "off",
        "precision": "bf16" if device == "cuda" else "fp32", "rehearse": "off", "master_weights": case.master_weights,
    }  # fmt: skip
    if case.optimizer_in_backward:
        train |= {"optimizer_in_backward": "on", "clip": 0}
    advanced = {
        "chunked_loss": "off" if case.whole else "on", "fused_forwards": "on" if case.fused else "off",
        "hopper_kernels": "off",
    }  # fmt: skip
    rest = {"advanced": advanced, "save": {"every": "24h"}, "log": {"tensorboard": "off"}, "limits": {"session": "off"}}
    return RunConfig.model_validate({"model": model, "method": method, "data": data, "train": train, **rest})


def lay(case: Case, config: RunConfig, folder: Path) -> None:
    """Everything that the case reads, where it is not there yet."""
    source = folder / "sources" / f"{case.name}.txt"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(f"{case}\n", encoding="utf-8")  # its bytes decide where the rows are found
    _write_words(folder / "words")
    if not case.new:
        _write_base(shape_of(case), folder / "bases" / shape_of(case).name)
    _write_rows(case, config, folder / "home" / "prepared")


def _write_words(folder: Path) -> None:
    if folder.is_dir():
        return
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    folder.mkdir(parents=True)
    words = Tokenizer(BPE())
    words.add_special_tokens([_END])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}), encoding="utf-8")


def _write_base(shape: ModelSpec, folder: Path) -> None:
    if (folder / "model.safetensors").is_file():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0}
    config = AutoConfig.for_model(shape.family, **sizes(shape), **ends, max_position_embeddings=_POSITIONS)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    forms = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    write_zeros(folder / "model.safetensors", forms)


def write_zeros(path: Path, forms: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of 16-bit zeros: a header, and a hole that costs the disk nothing."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in forms.items():
        size = 2
        for number in form:
            size *= number
        header[name] = {"dtype": "BF16", "shape": list(form), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _write_rows(case: Case, config: RunConfig, folder: Path) -> None:
    """An artefact where `prepare` looks for it: tokens drawn at random, documents of about the wanted length."""
    import numpy as np

    from sojourn.data.artefact import FORMAT
    from sojourn.data.inputs import open_inputs
    from sojourn.data.settings import data_settings
    from sojourn.storage.file_digests import FileDigests

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / open_inputs(data_settings(config), lambda line: None, config.advanced.split_digits).artefact_hash(
        FileDigests(folder / ".digests.json")
    )
    if (target / "artefact.json").is_file():
        return
    draw, vocabulary = np.random.default_rng(0), shape_of(case).vocab
    used, count = int(case.length * case.filled), 2 * case.rows * case.passes
    starts: list[int] = []
    for row in range(count):
        place = 0
        while place < used:
            starts.append(row * used + place)
            place += max(2, int(case.document * draw.uniform(0.5, 1.5))) if case.document else used
    arrays = {
        "tokens": draw.integers(0, vocabulary, count * used).astype("<u4"), "mask": np.ones(count * used, "|u1"),
        "documents": np.array(starts, "<i8"), "rows": np.arange(count + 1, dtype="<i8") * used,
    }  # fmt: skip
    files = {}
    for split in ("train", "eval"):
        (target / split).mkdir(parents=True)
        for kind, array in arrays.items():
            some = array if split == "train" else array[:1] if kind == "rows" else array[:0]
            some.tofile(target / split / f"{kind}.bin")
            files[f"{split}/{kind}.bin"] = {"bytes": some.nbytes, "sha256": ""}
    report = {"train": {"documents": len(starts), "tokens": count * used}}
    (target / "report.json").write_text(json.dumps(report), encoding="utf-8")
    facts = {
        "format": FORMAT, "kind": "rows", "dtype": "<u4", "max_length": case.length, "packing": config.data.packing,
        "vocab_size": vocabulary, "pad_id": 0, "stop_ids": [0], "chat": False, "files": files,
    }  # fmt: skip
    (target / "artefact.json").write_text(json.dumps(facts), encoding="utf-8")
