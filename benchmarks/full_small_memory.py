"""Full fine-tuning of a model's shape within a given memory: random weights made on the GPU, a real session on made
rows, some steps, and what they took.

    python -m benchmarks.full_small_memory --memory 22.5 --steps 20 [KEY=VALUE ...]

The settings are those of docs/training.md for little memory; KEY=VALUE changes them. torch may take no more than
`--memory` GiB from the GPU. Needs no weights and no data: the base is a file of holes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.planner.case_files import lay, settings_of
from benchmarks.planner.cases import Case
from benchmarks.planner.fast_opening import shorten_opening
from sojourn.config.load import with_settings

SMALL = {
    "train.master_weights": "bf16", "train.optimizer_in_backward": "on", "train.clip": 0, "train.weight_decay": 0.0,
    "advanced.async_step": "off",
}  # fmt: skip
_GIB = 2**30


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        os.environ["SOJOURN_HOME"] = str(Path(folder) / "home")
        run(arguments, Path(folder))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="llama-3.1-8b", help="a model of the catalogue, or of benchmarks/planner/cases.py"
    )
    parser.add_argument("--memory", type=float, default=22.5, help="GiB that torch may take")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="for files of a few MB; default: the temporary folder")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args()


def run(arguments: argparse.Namespace, folder: Path) -> None:
    import torch

    from sojourn.estimate.memory import memory
    from sojourn.run.folder import RunFolder
    from sojourn.train.calibration import workload_of_session
    from sojourn.train.loop import use_device
    from sojourn.train.ranks import Ranks
    from sojourn.train.session import open_session

    case = Case("small", "full", arguments.shape, arguments.length, arguments.rows, False, checkpointing="full",
                optimizer="paged_adamw_8bit")  # fmt: skip
    given = {key: typed(value) for key, value in (word.split("=", 1) for word in arguments.settings)}
    config = with_settings(settings_of(case, arguments.device, folder), SMALL | given | {"train.precision": "bf16"})
    lay(case, config, folder)
    device = use_device(config)
    on_gpu = device == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.memory * _GIB / total))
    shorten_opening(device)
    run_folder = RunFolder(folder / "home" / "runs" / "small")
    run_folder.path.mkdir(parents=True)
    began = time.monotonic()
    session = open_session(config, run_folder, Ranks(device=device))
    print(f"opened in {time.monotonic() - began:.1f} s; {peaks(on_gpu)}", flush=True)
    print(f"planned: {memory(workload_of_session(session)).allocated / _GIB:.2f} GiB allocated", flush=True)
    stepper, times = session.stepper, list[float]()
    stepper.engine.set_learning_rate(float(session.config.train.lr))
    for step in range(arguments.steps):
        batches, began = session.batches(step), time.perf_counter()
        loss, norm = stepper.step(batches)
        times.append(time.perf_counter() - began)
        rate = session.tokens(step) / times[-1]
        print(f"step {step + 1}: loss {loss:.4f}, norm {norm:.3f}, {rate:,.0f} tok/s; {peaks(on_gpu)}", flush=True)
    usual = statistics.median(times[2:] or times)
    print(f"{session.tokens(0) / usual:,.0f} tok/s in the median of steps from the third on; {peaks(on_gpu)}")


def typed(value: str) -> object:
    """A number where it is one."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def peaks(on_gpu: bool) -> str:
    import torch

    if not on_gpu:
        return "no GPU"
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return f"at most {allocated / _GIB:.2f} GiB allocated, {reserved / _GIB:.2f} GiB reserved"


if __name__ == "__main__":
    main()
