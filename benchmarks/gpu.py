"""Measures the figures of one GPU again, without a network: `python benchmarks/gpu.py OUT PART…`.

Each part takes up to ten minutes of an H200 and writes its JSON into OUT. Models are trained on the Python files of
torch and others, which are installed, and on the chats that `CHATS` names (synthetic ones by default). Weights and data
are made first, in the folder `BENCH_FOLDER`, and kept for the next call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("BENCH_FOLDER", Path(tempfile.gettempdir(), "sojourn-bench")))
CHATS = os.environ.get("CHATS", "")
CORPUS_BYTES = 100_000_000  # more than the longest part reads
_ADDED = {"site-packages", "dist-packages"}
TRAIN = ("sojourn", "bench", "train", "--folder", str(FOLDER))
PLAN = ("benchmarks.planner", "--folder", str(FOLDER), "--no-peers")
TEXT_DATA = ("--data", str(FOLDER / "code.jsonl"))
CHAT_DATA = ("--data", CHATS) if CHATS else ()

TESTS = ("tests/test_cuda_graphs.py", "tests/test_loss.py", "tests/test_fused_forwards.py", "tests/test_async_step.py")
OUR_ROWS = "bf16,chunked,fused,compile,async-step,graphs,fp8,nanogpt"
ADAPTER_ROWS = "async-step,full,liger-no-checkpointing"
LOSS_CURVE = ("--no-peers", "log.every_steps=1", "train.schedule=cosine", "train.warmup=100")
FP8_BACKWARD = ("--workload", "pretrain-875m", "--steps", "500", "--rows", "fp8-backward", *LOSS_CURVE)
LOW_LR = (*LOSS_CURVE, "train.lr=1e-4")  # two bf16 runs that differ in rounding stay together at this learning rate

# Commands of each part, and the workloads and steps to make files for; the size of the data depends on the steps.
PARTS: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, int]]]] = {
    "kernels": ([("benchmarks/kernels.py",)], []),
    "tests": ([("pytest", "-q", "-p", "no:cacheprovider", *TESTS)], []),
    "plan": ([(*PLAN, "--within", "500")], []),
    "plan-muon": ([(*PLAN, "--cases", "muon", "--within", "100")], []),
    "plan-launch": ([(*PLAN, "--cases", "thin", "--within", "200")], []),  # kernel launch overhead
    "plan-cuda-graphs": ([(*PLAN, "--cases", "played", "--within", "200")], []),  # what CUDA graphs leave of it
    "plan-seed-10": ([(*PLAN, "--draw", "24", "--seed", "10", "--within", "250")], []),  # may be fitted to
    "plan-seed-11": ([(*PLAN, "--draw", "24", "--seed", "11", "--within", "250")], []),  # not looked at yet
    "pretrain-110m": (
        [(*TRAIN, *TEXT_DATA, "--workload", "pretrain-110m", "--steps", "200", "--rows", "graphs,fp8,nanogpt")],
        [("pretrain-110m", 200)],
    ),
    "pretrain-110m-rows": (
        [(*TRAIN, *TEXT_DATA, "--workload", "pretrain-110m", "--steps", "200", "--rows", OUR_ROWS)],
        [("pretrain-110m", 200)],
    ),
    "pretrain-875m": (
        [(*TRAIN, *TEXT_DATA, "--workload", "pretrain-875m", "--steps", "200",
          "--rows", "graphs,hopper,transformers-compiled")],
        [("pretrain-875m", 200)],
    ),
    "fp8-low-lr": (
        [(*TRAIN, *TEXT_DATA, "--workload", "pretrain-875m", "--steps", "500", "--rows", "graphs,fp8", *LOW_LR)],
        [("pretrain-875m", 500)],
    ),
    "bf16-noise": (  # two bf16 runs against each other
        [(*TRAIN, *TEXT_DATA, "--workload", "pretrain-875m", "--steps", "500", "--rows", "hopper", *LOW_LR)],
        [("pretrain-875m", 500)],
    ),
    "fp8-high-lr": (  # three times that learning rate
        [(*TRAIN, *TEXT_DATA, "--workload", "pretrain-875m", "--steps", "500",
          "--rows", "graphs,fp8-backward", *LOSS_CURVE)],
        [("pretrain-875m", 500)],
    ),
    "fp8-high-lr-orders": (  # with the text in other orders
        [(*TRAIN, *TEXT_DATA, *FP8_BACKWARD, f"train.seed={seed}") for seed in (1, 2, 3)],
        [("pretrain-875m", 500)],
    ),
    "full-1.5b": (
        [(*TRAIN, *CHAT_DATA, "--workload", "full-1.5b", "--steps", "200", "--rows", "async-step,hopper,liger")],
        [("full-1.5b", 200)],
    ),
    "qlora-7b": (
        [(*TRAIN, *CHAT_DATA, "--workload", "qlora-7b", "--steps", "200", "--rows", "full,liger")], [("lora-7b", 200)]
    ),
    "lora-7b": (
        [(*TRAIN, *CHAT_DATA, "--workload", "lora-7b", "--steps", "200", "--rows", ADAPTER_ROWS)],
        [("lora-7b", 200)],
    ),
}  # fmt: skip


def main() -> None:
    if len(sys.argv) < 3 or not set(sys.argv[2:]) <= set(PARTS):
        sys.exit(f"usage: python benchmarks/gpu.py OUT PART…; parts: {', '.join(PARTS)}")
    out, parts = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_corpus(FOLDER / "code.jsonl")
    started = [make_files(*one) for one in dict.fromkeys(one for part in parts for one in PARTS[part][1])]
    for part in sorted(parts, key=lambda part: part != "tests"):  # they may run while files are made
        for number, command in enumerate(PARTS[part][0]):
            if part != "tests":
                for process in started:
                    process.wait()
            result = out / f"{part}{number or ''}.json"
            run(part, command, result)


def run(part: str, command: tuple[str, ...], result: Path) -> None:
    script = command[0].endswith(".py")
    out = (
        ("--out", str(result)) if command[0] in ("sojourn", "benchmarks.planner") else (str(result),) if script else ()
    )
    resumed = ("--resume", str(result)) if part == "plan" and result.is_file() else ()
    started = time.time()
    print(f"== {part}: {' '.join((*command, *out, *resumed))}", flush=True)
    code = subprocess.run(
        [sys.executable, *(() if script else ("-m",)), *command, *out, *resumed], cwd=ROOT, check=False
    ).returncode
    print(f"== {part}: {time.time() - started:.0f} s, exit code {code}", flush=True)


def make_files(workload: str, steps: int) -> subprocess.Popen[bytes]:
    """In parallel: only the CPU works."""
    data = (CHAT_DATA if "lora" in workload or "full" in workload else TEXT_DATA)[1:]
    script = (
        "import sys; from pathlib import Path; from sojourn.bench.train.workload_files import make_files; "
        "from sojourn.bench.train.workloads import WORKLOADS as all; "
        "make_files(all[sys.argv[1]], int(sys.argv[2]), 'cuda', Path(sys.argv[3]), *sys.argv[4:])"
    )
    return subprocess.Popen([sys.executable, "-c", script, workload, str(steps), str(FOLDER), *data])


def write_corpus(path: Path) -> None:
    if path.is_file():
        return
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sources():
            text = source.read_text(encoding="utf-8", errors="ignore")
            size += file.write(json.dumps({"text": text}) + "\n") if text else 0
            if size > CORPUS_BYTES:
                return


def sources() -> Iterator[Path]:
    """Not those of transformers, many of which repeat each other."""
    for name in ("torch", "sympy", "numpy"):
        found = find_spec(name)
        if found and found.origin:
            yield from sorted(Path(found.origin).parent.rglob("*.py"))
    standard = Path(sysconfig.get_path("stdlib"))
    yield from (one for one in sorted(standard.rglob("*.py")) if not _ADDED & set(one.relative_to(standard).parts))


if __name__ == "__main__":
    main()
