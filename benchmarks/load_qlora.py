"""What it takes to load a 7B for QLoRA: host memory, GPU memory, and the seconds until the first step.

    python -m benchmarks.load_qlora [--bits 8] [--kind lora] [--cold]

Writes a random model of Qwen2.5-7B's shape (15 GB) in four files, then runs `sojourn train` on it for two steps.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.export import Watcher, drop_page_cache

SHAPES = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 4096},
}  # fmt: skip
SHARDS = 4
_BUILD = "sojourn.train.build"
_GIB = 2**30


def write_base(folder: Path, shape: str, device: str) -> None:
    """In a process of its own, which gives the GPU back."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen2", **SHAPES[shape], tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    names, weights = {}, list(model.state_dict().items())
    total = sum(weight.nbytes for _, weight in weights)
    for number in range(SHARDS):
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        shard, size = {}, 0
        while weights and (size < total / SHARDS or number == SHARDS - 1):
            name, weight = weights.pop(0)
            shard[name] = torch.randn(weight.shape, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()
            names[name], size = file, size + weight.nbytes
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_chats(path: Path) -> None:
    lines = [{"prompt": f"What is {i} times {i + 1}?", "completion": f"It is {i * (i + 1)}."} for i in range(4000)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


def copy_tokenizer(chats: Path, home: Path, base: Path) -> None:
    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare

    settings = load_run(["smoke", f"data.sources={chats}", "data.vocab_size=2000"]).config.data
    for file in prepare(settings, home / "prepared").tokenizer.iterdir():
        shutil.copy(file, base / file.name)


class _OnImport(importlib.abc.MetaPathFinder):
    """Measures `load_base_model` as soon as training imports it, without importing torch before that."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _BUILD:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.load_base_model = self._measured(module.load_base_model)

        spec.loader.exec_module = exec_module
        return spec

    def _measured(self, load: Any) -> Any:
        def measured(*given: Any) -> Any:
            import torch

            began = time.time()
            model = load(*given)
            found = {"load_began": began, "load_s": time.time() - began}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                found |= {"load_s": time.time() - began, "allocated": torch.cuda.memory_allocated()}
                found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
                torch.cuda.reset_peak_memory_stats()
            self._out.write_text(json.dumps(found), encoding="utf-8")
            return model

        return measured


def train_words(given: argparse.Namespace, folder: Path) -> list[str]:
    bits = [f"method.bits={given.bits}"] if given.kind == "qlora" else []
    return [
        "train", f"model.base={folder / 'base'}", f"data.sources={folder / 'chats.jsonl'}", f"method.kind={given.kind}",
        *bits, f"data.max_length={given.length}", f"train.device={given.device}", "train.steps=2",
        "train.global_batch=8", "limits.session=off", "log.tensorboard=off", "log.every_steps=1", "name=load",
    ]  # fmt: skip


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    base, out, home = folder / "base", folder / "load.json", folder / "home"
    base.mkdir()
    write_chats(folder / "chats.jsonl")
    copy_tokenizer(folder / "chats.jsonl", home, base)
    me = [sys.executable, "-m", "benchmarks.load_qlora"]
    subprocess.run([*me, "--write", str(base), "--shape", given.shape, "--device", given.device], check=True)
    cold = drop_page_cache() if given.cold else False
    metrics, first = home / "runs" / "load" / "metrics.jsonl", None
    environment = {**os.environ, "SOJOURN_HOME": str(home)}
    began = time.time()
    with subprocess.Popen([*me, "--child", str(out), *train_words(given, folder)], env=environment) as process:
        watcher = Watcher(process.pid)
        while process.poll() is None:
            if first is None and metrics.is_file() and '"step"' in metrics.read_text(encoding="utf-8"):
                first = time.time() - began
            time.sleep(0.01)
    host, load = watcher.stop(), json.loads(out.read_text(encoding="utf-8"))
    if process.returncode or first is None:
        raise SystemExit(f"sojourn train: exit code {process.returncode}")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    gpu = {"peak_while_loading_GiB": load["peak"], "reserved_while_loading_GiB": load["reserved"],
           "weights_GiB": load["allocated"], "peak_while_training_GiB": max(line.get("memory") or 0 for line in lines),
           } if "peak" in load else {}  # fmt: skip
    host = {f"{name}_GiB": bytes_ for name, bytes_ in host.items()}
    seconds = {"to_first_step_s": first, "to_load_s": load["load_began"] - began, "load_s": load["load_s"]}
    facts = {"kind": given.kind, "bits": given.bits, "shape": given.shape, "cold": cold}
    return facts | {key: round(value / _GIB, 2) for key, value in (host | gpu).items()} | seconds


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        sys.meta_path.insert(0, _OnImport(Path(sys.argv[2])))
        sys.argv = ["sojourn", *sys.argv[3:]]
        from sojourn.cli.main import main as sojourn

        sojourn()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8])
    parser.add_argument("--kind", default="qlora", choices=["qlora", "lora"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--shape", default="7b", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write_base(given.write, given.shape, given.device)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        print(json.dumps(measure(given, Path(name)), indent=2))


if __name__ == "__main__":
    main()
