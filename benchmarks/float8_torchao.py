"""Our FP8 beside torchao's float8, in one run: `PYTHONPATH=TORCHAO python benchmarks/float8_torchao.py --out OUT.json`.

Every row is `sojourn train` in a fresh process: the same weights, rows, loop, optimizer and per-layer torch.compile.

  bf16                 the baseline
  fp8                  train.fp8=on: all linear layers and the LM head
  fp8-decoder          the same, with the LM head in bf16, as in torchao's rows
  torchao-tensorwise   `convert_to_float8_training` on the decoder's linear layers, one scale per tensor
  torchao-rowwise      the same, one scale per row

torchao's rows keep the fused forwards, but q/k/v and gate/up are separate matmuls there: torchao converts layers, not
concatenated weights. Prints throughput (tokens/s), peak memory (bytes) and losses of each row as JSON.
On a CPU, for a test of the script: --workload tiny --emulate (our FP8 rows need a GPU and are left out).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

_RECIPES = ("tensorwise", "rowwise")
_COMMON = {
    "train.activation_checkpointing": "off", "train.compile": "on", "train.optimizer": "adamw", "train.offload": "off",
    "train.cuda_graphs": "off", "train.fp8": "off", "advanced.chunked_loss": "on", "advanced.fused_forwards": "on",
    "advanced.hopper_kernels": "off",
}  # fmt: skip


def main() -> None:
    arguments = _parse()
    folder = tempfile.TemporaryDirectory() if arguments.folder is None else nullcontext(arguments.folder)
    with folder as work:
        result = measure(arguments, Path(work).absolute())
    print(json.dumps(result, indent=1))


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    from sojourn.bench.train import measure as bench_measure
    from sojourn.bench.train.workload_files import make_files, prepare_rows, run_settings
    from sojourn.storage.files import write_json

    bench = bench_measure.make_bench([arguments.workload], "", arguments.steps, False, work, out=arguments.out)
    (workload,) = bench.workloads
    files = make_files(workload, bench.steps, bench.device, work)
    run = work / "run.yaml"
    write_json(run, run_settings(files, bench.steps, bench.log_every, bench.device))
    prepared = prepare_rows(files, run)
    result = bench_measure.describe_environment(bench.device) | {
        "command": " ".join(sys.argv), "torchao": _torchao_version(), "workload": workload.name, "steps": bench.steps,
        "rows": [],
    }  # fmt: skip
    start_process = bench_measure.run_sampled
    for bench_row in _bench_rows(bench.device):
        if arguments.rows and bench_row.name not in arguments.rows:
            continue
        patch = [str(Path(__file__).absolute()), "--patch", bench_row.name, *(["--emulate"] * arguments.emulate)]

        def start_patched(command: list[str], *args: Any, patch: list[str] = patch) -> Any:
            """`python -m sojourn train …`, by this script, which changes the network's linear layers first."""
            return start_process([command[0], *patch, *command[3:]], *args)

        bench_measure.run_sampled = start_patched
        row = bench_measure.run_row(bench, bench_row, files, run, prepared, work)
        result["rows"].append({key: value for key, value in row.items() if key != "intervals"})
        print(
            json.dumps({key: row.get(key) for key in ("name", "tokens_per_second", "peak_memory", "note")}), flush=True
        )
        if arguments.out is not None:
            write_json(arguments.out, result)
    return result


def _bench_rows(device: str) -> list[Any]:
    from sojourn.bench.train.bench_row import OURS, BenchRow

    settings = _COMMON | (
        {"train.precision": "bf16", "train.attention": "varlen", "advanced.async_step": "on"}
        if device == "cuda"
        else {"train.precision": "fp32", "train.attention": "sdpa"}
    )
    bf16 = BenchRow("bf16", "bf16", OURS, settings)
    fp8 = replace(bf16, name="fp8", title="our FP8", settings={**settings, "train.fp8": "on"})
    ours = [fp8, replace(fp8, name="fp8-decoder", title="our FP8, LM head in bf16")] if device == "cuda" else []
    torchao = [
        replace(bf16, name=f"torchao-{recipe}", title=f"torchao, {recipe}", needs=("torchao",)) for recipe in _RECIPES
    ]
    return [bf16, *ours, *torchao]


def run_patched(row: str, emulate: bool, args: list[str]) -> None:
    """Runs `sojourn ARGS` after replacing what happens to the network just before its layers are compiled."""
    from sojourn.model import layers

    compile_layers = layers.compile_layers

    def convert_and_compile(model: Any) -> None:
        if row.startswith("torchao-"):
            convert_to_torchao(model, row.removeprefix("torchao-"), emulate)
        elif row == "fp8-decoder":
            model.get_output_embeddings().fp8 = False
        compile_layers(model)

    layers.compile_layers = convert_and_compile  # before train/build.py imports it
    sys.argv = ["sojourn", *args]
    from sojourn.cli.main import main as sojourn

    sojourn()


def convert_to_torchao(model: Any, recipe: str, emulate: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    lm_head = model.get_output_embeddings()
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, _: module is not lm_head)
    converted = sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    print(f"note: torchao {_torchao_version()} {recipe}: {converted} linear layers converted", flush=True)
    if not converted:
        raise RuntimeError("torchao converted no linear layer")


def _torchao_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torchao")
    except PackageNotFoundError:
        return None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="pretrain-875m", help="of `sojourn bench train`")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", nargs="*", help="names of rows; all by default")
    parser.add_argument("--folder", type=Path, help="keeps weights and data there, for another call")
    parser.add_argument("--out", type=Path, help="the result, written after each row")
    parser.add_argument("--emulate", action="store_true", help="torchao without FP8 hardware")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--patch"]:
        rest = sys.argv[3:]
        run_patched(sys.argv[2], "--emulate" in rest, [arg for arg in rest if arg != "--emulate"])
    else:
        main()
