"""Every kind of `sojourn quantize` on a Llama of 1.2 B random weights: size, speed, perplexity and drift, in one table.

    python benchmarks/quantize.py [--kinds int8,fp8] [--layers 16] [--smoke] [--folder DIR] [--out FILE]

Model and tokenizer are made here, so that nothing is downloaded. Each kind is written, replayed beside the source by
the parity gate, measured and verified, by the functions that `sojourn quantize` and `sojourn verify` call. What a kind
needs and this machine lacks is a row that says so. Perplexity is of text that random weights know nothing of: its
change shows whether the quantized model computes the same, not what quantization costs a trained one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sojourn.errors import UserError
from sojourn.export.export import CARD
from sojourn.export.open_source import Source, open_weights
from sojourn.export.quantize.kinds import KINDS, refuse_kind
from sojourn.export.quantize.measure import measure
from sojourn.export.quantize.table import HEADER, caption, rows
from sojourn.export.quantize.write import write
from sojourn.export.reference import Reference, save_reference
from sojourn.export.replay import replay_export
from sojourn.export.source_reference import source_reference
from sojourn.export.stage import ExportStage
from sojourn.export.verify import verify_export

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
SMOKE = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
TORCH_KINDS = "int8,int8-dynamic,fp8,int4,nf4"


class Lines:
    """A `Progress` that prints notes only."""

    def start(self, what: str, total: int) -> None:
        """No bar."""

    def advance(self, count: int, is_new: bool = True) -> None:
        """No bar."""

    def say(self, line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)


def make_model(folder: Path, layers: int, smoke: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from benchmarks.export import write_tokenizer
    from sojourn.model.quiet import quiet_transformers

    quiet_transformers()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = LlamaConfig(**{**LLAMA_1B, **(SMOKE if smoke else {})}, num_hidden_layers=layers)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)


def one_kind(name: str, source: Source, reference: Reference, folder: Path) -> dict[str, Any]:
    kind, progress, seconds = KINDS[name], Lines(), {}
    refuse_kind(kind)
    with ExportStage(folder / name, "benchmark", progress) as stage:
        stage.group("probes", lambda at: save_reference(reference, at))
        began = time.perf_counter()
        write(source, stage, name, progress)
        seconds["write"] = round(time.perf_counter() - began, 1)
        gate = replay_export(stage.path, kind.format, name, reference, progress.say, weights=source.weights)
        found = {"gate": gate.facts(), "drift": gate.drift, "measured": measure(source, stage, name, progress)}
        stage.text(CARD, name)
        path = stage.finish({"format": kind.format, "quantization": name})
    return {**found, "verified": verify_export(path, progress.say).problem or "yes", "seconds": seconds}


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines, done = [], {name: one for name, one in found.items() if "measured" in one}
    for name, one in found.items():
        if name not in done:
            lines.append(f"{name}: {one['failed']}")
    shown = [(*HEADER, "relative error", "worst", "KL", "gate", "verify")]
    for name, one in done.items():
        source, quantized, change = rows(one["measured"], name)
        replay = one["gate"]["replay"] or {"figures": {}}
        keys = ("relative error", "worst relative error", "KL divergence")
        figures = [f"{replay['figures'].get(key) or float('nan'):.2g}" for key in keys]
        shown += [source + ("",) * 5] if name == next(iter(done)) else []
        shown.append((*quantized, *figures, one["drift"] or "passed", one["verified"]))
        shown.append(change + ("",) * 5)
    widths = [max(len(row[at]) for row in shown) for at in range(len(shown[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return [*lines, *(caption(one["measured"]) for one in list(done.values())[:1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=TORCH_KINDS)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to try this script")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        os.environ["SOJOURN_HOME"] = str(folder / "home")
        make_model(folder / "model", given.layers, given.smoke)
        source = open_weights(str(folder / "model"))
        reference = source_reference(source, Lines().say)
        for kind in given.kinds.split(","):
            print(f"{kind}:", file=sys.stderr, flush=True)
            try:
                found[kind] = one_kind(kind, source, reference, folder)
            except UserError as error:
                found[kind] = {"failed": str(error)}
            except Exception as error:  # a library's: the other kinds are measured still
                found[kind] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            print(f"  {found[kind].get('failed') or found[kind]['seconds']}", file=sys.stderr, flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
