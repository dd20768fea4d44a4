"""Merges and exports a 7B-shaped adapter: peak memory, and speed against the disk's own copy in the same run.

    python benchmarks/export.py --folder /some/disk [--layers 32] [--out FILE]

A base of random weights in bf16 (Llama-2-7B's sizes, 13.5 GB) and a LoRA of rank 16 on all its linear layers are
written to a temporary folder. Then, from a cold page cache where that can be had: `cp` of the base with fsync, and the
merged export in a process of its own, watched from outside. With --gate, also `sojourn merge` as typed, which computes
the logits of source and export, layer by layer. The folder needs three times the base. Everything is removed at the
end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
SHARD = 3_000_000_000
RANK = 16
WRITE = """
import json, sys, time
from pathlib import Path
from sojourn.export import hf
from sojourn.export.open_source import open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.stage import ExportStage

began = time.perf_counter()
source = open_weights(sys.argv[1])
with ExportStage(Path(sys.argv[2]), source.fingerprint) as stage:
    hf.write(source, stage, "auto", NoProgress())
    seconds = {"write": time.perf_counter() - began}
    stage.finish({})  # hashes, which an export does while it is replayed
    seconds["hash"] = time.perf_counter() - began - seconds["write"]
print(json.dumps({"seconds": seconds}))
"""


def make_base(folder: Path, layers: int) -> int:
    """Random weights as a folder of shards; returns their bytes."""
    import torch

    from sojourn.storage.files import write_json

    hidden, ffn, vocab = (SIZES[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linear_shapes().items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{name}.weight": (hidden,) for name in norms}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    folder.mkdir()
    write_json(folder / "config.json", llama_config(layers))
    write_json(folder / "generation_config.json", {"eos_token_id": 1})
    write_tokenizer(folder)
    torch.manual_seed(0)
    noise = (torch.randn(ffn * hidden + (1 << 20)) * 0.02).to(torch.bfloat16)
    shards, index = split(shapes), {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index |= dict.fromkeys(names, file)
        write_shard(folder / file, {name: shapes[name] for name in names}, noise)
    total = sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    return total


def linear_shapes() -> dict[str, tuple[int, int]]:
    hidden, ffn = SIZES["hidden_size"], SIZES["intermediate_size"]
    attention = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    return attention | {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}


def llama_config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, "dtype": "bfloat16",
        "num_key_value_heads": SIZES["num_attention_heads"], "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1, **SIZES,
    }  # fmt: skip


def split(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if filled + size > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], noise: Any) -> None:
    """Every tensor is another piece of the same noise: a gigabyte of random numbers takes long."""
    import torch

    header, start = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (name, shape) in enumerate(shapes.items()):
            values, shift = shape[0] * (shape[1] if len(shape) > 1 else 1), 997 * number % (1 << 20)
            if "norm" in name:
                file.write(torch.ones(values, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
                continue
            while values:
                piece = noise[shift : shift + min(values, len(noise) - (1 << 20))]
                file.write(memoryview(piece.view(torch.uint8).numpy()))
                values -= len(piece)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{letter: number for number, letter in enumerate(alphabet, 2)}}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    fast.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    fast.save_pretrained(folder)


def make_adapter(folder: Path, base: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    from sojourn.storage.files import write_json

    folder.mkdir()
    torch.manual_seed(1)
    tensors = {}
    for layer in range(layers):
        for name, (rows, columns) in linear_shapes().items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, columns) * 0.01
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, RANK) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "task_type": "CAUSAL_LM"}
    names = sorted({name.rpartition(".")[2] for name in linear_shapes()})
    write_json(
        folder / "adapter_config.json", {**settings, "target_modules": names, "base_model_name_or_path": str(base)}
    )


def drop_page_cache() -> bool:
    """Whether what follows reads from the disk."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def copy_seconds(base: Path, target: Path) -> float:
    """`cp`, then fsync of every file."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(base), str(target)], check=True)
    for file in target.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
    return time.perf_counter() - began


class Watcher:
    """Peak memory of a process: all of it (RSS), and what is its own (anonymous)."""

    def __init__(self, pid: int) -> None:
        self.peak: dict[str, int] = {}
        self._pid, self._stop = pid, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            try:
                lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            except OSError:
                return
            for line in lines:
                key, _, value = line.partition(":")
                if key in ("VmHWM", "RssAnon", "RssFile", "RssShmem"):
                    self.peak[key] = max(self.peak.get(key, 0), int(value.split()[0]) * 1024)

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.peak


def merge(adapter: Path, out: Path, gate: bool) -> tuple[float, dict[str, int], dict[str, Any]]:
    """Seconds, peak memory, and what it printed."""
    whole = ["-m", "sojourn", "merge", str(adapter), "--out", str(out), "--json"]
    command = [sys.executable, *(whole if gate else ["-c", WRITE, str(adapter), str(out)])]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watcher = Watcher(process.pid)
        output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return time.perf_counter() - began, watcher.stop(), json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        result = measure(Path(name), given.layers, given.repeats, given.gate)
    print(json.dumps(result, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(folder: Path, layers: int, repeats: int, gate: bool) -> dict[str, Any]:
    base, adapter = folder / "base", folder / "adapter"
    total = make_base(base, layers)
    make_adapter(adapter, base, layers)
    rows = []
    for _ in range(repeats):
        cold = drop_page_cache()
        copied = copy_seconds(base, folder / "copy")
        shutil.rmtree(folder / "copy")
        drop_page_cache()
        load = os.getloadavg()[0]
        seconds, peak, facts = merge(adapter, folder / "merged", gate)
        shutil.rmtree(folder / "merged")
        write = facts["seconds"]["write"]
        row = {
            "cold": cold, "copy_s": copied, "copy_MBs": total / copied / 1e6, "write_s": write,
            "write_MBs": total / write / 1e6, "share_of_copy": copied / write, "process_s": seconds, "gate": gate,
            "load_before": load,
            "seconds": facts["seconds"], "peak_rss_GiB": peak["VmHWM"] / 2**30,
            "peak_anonymous_GiB": peak["RssAnon"] / 2**30, "peak_file_GiB": peak["RssFile"] / 2**30,
        }  # fmt: skip
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
    return {**machine, "bytes": total, "layers": layers, "rank": RANK, "rows": rows}


if __name__ == "__main__":
    main()
