"""Measures again what LOG.md says of one GPU, where no network need be: `python benchmarks/gpu.py OUT PART…`.

Each part takes up to ten minutes of an H200 and leaves its JSON in OUT. Models are trained on the Python files of torch
and others, which are there, and on chats that `CHATS` names (made-up ones by default). What parts need is laid
down in `GROUND` at first, a folder that is kept for the next call.
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
GROUND = Path(os.environ.get("GROUND", Path(tempfile.gettempdir(), "sojourn-bench")))
CHATS = os.environ.get("CHATS", "")
CORPUS_BYTES = 100_000_000  # more than the longest part reads
_ADDED = {"site-packages", "dist-packages"}
TRAIN = ("sojourn", "bench", "train", "--folder", str(GROUND))
PLAN = ("sojourn", "bench", "plan", "--folder", str(GROUND), "--no-peers")
TEXTS = ("--data", str(GROUND / "code.jsonl"))
TALKS = ("--data", CHATS) if CHATS else ()

TESTS = ("tests/test_cuda_graphs.py", "tests/test_loss.py", "tests/test_fast.py", "tests/test_async_step.py")
SMALL = "bf16,chunked,fused,compile,async-step,graphs,fp8,nanogpt"  # the ladder, and whom to beat
CURVE = ("--no-peers", "log.every_steps=1", "train.schedule=cosine", "train.warmup=100")
BACKWARD = ("--workload", "pretrain-875m", "--steps", "500", "--rows", "fp8-backward", *CURVE)
CALM = (*CURVE, "train.lr=1e-4")  # two runs in bf16, which differ by rounding, stay together at that rate
LARGE = "graphs,hopper,transformers-compiled"
ADAPTERS = "async-step,full,liger-no-checkpointing"

# Commands of each part, with what to lay down for them: workloads and steps, on which the size of their data depends.
PARTS: dict[str, tuple[list[tuple[str, ...]], list[tuple[str, int]]]] = {
    "kernels": ([("benchmarks/kernels.py",)], []),
    "tests": ([("pytest", "-q", "-p", "no:cacheprovider", *TESTS)], []),
    "plan": ([(*PLAN, "--within", "500")], []),
    "muon": ([(*PLAN, "--cases", "muon", "--within", "100")], []),  # with what torch keeps
    "thin": ([(*PLAN, "--cases", "thin", "--within", "200")], []),  # what launching costs
    "played": ([(*PLAN, "--cases", "played", "--within", "200")], []),  # and what is left of it in recordings
    "drawn": ([(*PLAN, "--draw", "24", "--seed", "10", "--within", "250")], []),  # which may be fitted to
    "blind": ([(*PLAN, "--draw", "24", "--seed", "11", "--within", "250")], []),  # which has not been looked at
    "race": (
        [(*TRAIN, *TEXTS, "--workload", "pretrain-110m", "--steps", "200", "--rows", "graphs,fp8,nanogpt")],
        [("pretrain-110m", 200)],
    ),
    "small": (
        [(*TRAIN, *TEXTS, "--workload", "pretrain-110m", "--steps", "200", "--rows", SMALL)],
        [("pretrain-110m", 200)],
    ),
    "large": (
        [(*TRAIN, *TEXTS, "--workload", "pretrain-875m", "--steps", "500", "--rows", "graphs,fp8", *CALM)],
        [("pretrain-875m", 500)],
    ),
    "apart": (  # how far bf16 is from itself there
        [(*TRAIN, *TEXTS, "--workload", "pretrain-875m", "--steps", "500", "--rows", "hopper", *CALM)],
        [("pretrain-875m", 500)],
    ),
    "steep": (  # what 8 bits cost at three times that rate
        [(*TRAIN, *TEXTS, "--workload", "pretrain-875m", "--steps", "500", "--rows", "graphs,fp8-backward", *CURVE)],
        [("pretrain-875m", 500)],
    ),
    "again": (  # and with the texts in other orders, of which bf16 is known
        [(*TRAIN, *TEXTS, *BACKWARD, f"train.seed={seed}") for seed in (1, 2, 3)],
        [("pretrain-875m", 500)],
    ),
    "plain": (
        [(*TRAIN, *TEXTS, "--workload", "pretrain-875m", "--steps", "200", "--rows", LARGE)],
        [("pretrain-875m", 200)],
    ),
    "whole": (
        [(*TRAIN, *TALKS, "--workload", "full-1.5b", "--steps", "200", "--rows", "async-step,hopper,liger")],
        [("full-1.5b", 200)],
    ),
    "qlora": (
        [(*TRAIN, *TALKS, "--workload", "qlora-7b", "--steps", "200", "--rows", "full,liger")], [("lora-7b", 200)]
    ),
    "lora": (
        [(*TRAIN, *TALKS, "--workload", "lora-7b", "--steps", "200", "--rows", ADAPTERS)],
        [("lora-7b", 200)],
    ),
}  # fmt: skip


def main() -> None:
    if len(sys.argv) < 3 or not set(sys.argv[2:]) <= set(PARTS):
        sys.exit(f"usage: python benchmarks/gpu.py OUT PART…; parts: {', '.join(PARTS)}")
    out, parts = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    GROUND.mkdir(parents=True, exist_ok=True)
    write_corpus(GROUND / "code.jsonl")
    started = [lay(*one) for one in dict.fromkeys(one for part in parts for one in PARTS[part][1])]
    for part in sorted(parts, key=lambda part: part != "tests"):  # which may run while ground is laid
        for number, command in enumerate(PARTS[part][0]):
            if part != "tests":
                for process in started:
                    process.wait()
            result = out / f"{part}{number or ''}.json"
            run(part, command, result)


def run(part: str, command: tuple[str, ...], result: Path) -> None:
    script = command[0].endswith(".py")
    kept = ("--out", str(result)) if command[0] == "sojourn" else (str(result),) if script else ()
    resumed = ("--resume", str(result)) if part == "plan" and result.is_file() else ()
    began = time.time()
    print(f"== {part}: {' '.join((*command, *kept, *resumed))}", flush=True)
    code = subprocess.run(
        [sys.executable, *(() if script else ("-m",)), *command, *kept, *resumed], cwd=ROOT, check=False
    ).returncode
    print(f"== {part}: {time.time() - began:.0f} s, exit code {code}", flush=True)


def lay(workload: str, steps: int) -> subprocess.Popen[bytes]:
    """All at once: it is the work of CPUs."""
    data = (TALKS if "lora" in workload or "full" in workload else TEXTS)[1:]
    script = (
        "import sys; from pathlib import Path; from sojourn.bench.train.workload_files import make_files; "
        "from sojourn.bench.train.workloads import WORKLOADS as all; "
        "make_files(all[sys.argv[1]], int(sys.argv[2]), 'cuda', Path(sys.argv[3]), *sys.argv[4:])"
    )
    return subprocess.Popen([sys.executable, "-c", script, workload, str(steps), str(GROUND), *data])


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
    """Not those of transformers: much of them is one model's file with another's name in it."""
    for name in ("torch", "sympy", "numpy"):
        found = find_spec(name)
        if found and found.origin:
            yield from sorted(Path(found.origin).parent.rglob("*.py"))
    standard = Path(sysconfig.get_path("stdlib"))
    yield from (one for one in sorted(standard.rglob("*.py")) if not _ADDED & set(one.relative_to(standard).parts))


if __name__ == "__main__":
    main()
