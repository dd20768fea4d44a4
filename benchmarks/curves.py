"""Draws the loss curves of our rows and of peers in the same run, with their relative difference:
`python benchmarks/curves.py OUT.svg`. The measured losses are in `results/`."""

from __future__ import annotations

import json
import sys
from collections import ChainMap
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILES = tuple(f"train-H200-2026-11-{day}.json" for day in (15, 16, 17))
LOW_LR = "train.lr=1e-4"
# Title; workload, steps, our row, the other row, and a part of the command: of the newest run that has both rows,
# otherwise of the newest run of each. Row names are those of the day: ahead = async-step, fp8-inner =
# fp8-except-last-layer, liger-kept = liger-no-checkpointing.
PANELS = (
    ("LoRA 7B, no checkpointing, and Liger", "lora-7b", 200, "ahead", "liger-kept", ""),
    ("QLoRA 7B, full checkpointing, and Liger", "qlora-7b", 200, "full", "liger", ""),
    ("Full fine-tuning 1.5B, and Liger", "full-1.5b", 200, "ahead", "liger", ""),
    ("875M, and transformers compiled", "pretrain-875m", 200, "hopper", "transformers-compiled", "plain.json"),
    ("875M at 1e-4: bf16, and FP8 on", "pretrain-875m", 500, "graphs", "fp8", LOW_LR),
    ("875M at 1e-4: bf16, and bf16 with Hopper kernels", "pretrain-875m", 500, "graphs", "hopper", LOW_LR),
    ("875M at 3e-4: bf16, and FP8 on", "pretrain-875m", 500, "graphs", "fp8", "log.every_steps=1"),
    ("875M at 3e-4: bf16, and FP8 except_last_layer", "pretrain-875m", 500, "graphs", "fp8-inner", "--out steep.json"),
    ("FP8 except_last_layer, worst of four orders", "pretrain-875m", 500, "graphs", "fp8-inner", "train.seed=3"),
    ("875M at 3e-4: bf16, and FP8 backward", "pretrain-875m", 500, "graphs", "fp8-backward", "--out steep.json"),
    ("FP8 backward, worst of four orders", "pretrain-875m", 500, "graphs", "fp8-backward", "train.seed=1"),
    (
        "875M at 3e-4, other text: bf16, and Hopper kernels",
        "pretrain-875m",
        500,
        "graphs",
        "hopper",
        "--schedule cosine",
    ),
    ("110M, and a Llama of 70 lines", "pretrain-110m", 200, "together", "plain", ""),
    ("110M: bf16, and FP8 on", "pretrain-110m", 200, "graphs", "fp8", ""),
)
WIDTH, LOSS, DIFFERENCE, MARGIN, COLUMNS = 400, 170, 70, 46, 2
HEIGHT = LOSS + DIFFERENCE + 90
BOUND = 2.0  # per cent shown in the lower half
OURS, OTHER = "#2563eb", "#ea580c"

Curve = dict[int, float]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/curves.py OUT.svg")
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")


def draw() -> str:
    runs = [run for name in FILES for run in json.loads((RESULTS / name).read_text(encoding="utf-8"))["runs"]]
    width, height = COLUMNS * WIDTH, -(-len(PANELS) // COLUMNS) * HEIGHT
    panels = "".join(_panel(number, title, *_curves(runs, *which)) for number, (title, *which) in enumerate(PANELS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11"><title>Losses of the same steps on one H200</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{panels}</svg>\n'
    )


def _curves(
    runs: list[dict[str, Any]], workload: str, steps: int, ours: str, other: str, command: str
) -> tuple[Curve, Curve]:
    tables = [
        {row["name"]: row["losses"] for row in table["rows"]}
        for run in reversed(runs) if run["steps"] == steps and command in run["command"]
        for table in run["workloads"] if table["workload"] == workload
    ]  # fmt: skip
    both = next((losses for losses in tables if {ours, other} <= set(losses)), ChainMap(*tables))
    if not {ours, other} <= set(both):
        sys.exit(f"no run of {workload} with {steps} steps has {ours} and {other}")
    return _tenths(both[ours]), _tenths(both[other])


def _tenths(losses: dict[str, float]) -> Curve:
    """Every tenth step, as most runs log them."""
    return {int(step): loss for step, loss in losses.items() if step == "1" or int(step) % 10 == 0}


def _panel(number: int, title: str, ours: Curve, other: Curve) -> str:
    left, top = number % COLUMNS * WIDTH + MARGIN, number // COLUMNS * HEIGHT + 34
    last, values = max(ours), [*ours.values(), *other.values()]
    low, high = min(values), max(values)
    differences = {step: 100 * (loss / ours[step] - 1) for step, loss in other.items() if step in ours}

    def x(step: int) -> float:
        return round(left + (WIDTH - MARGIN - 20) * step / last, 1)

    def y(loss: float) -> float:
        return round(top + LOSS * (high - loss) / (high - low), 1)

    def z(off: float) -> float:
        return round(top + LOSS + 24 + DIFFERENCE * (BOUND - max(-BOUND, min(BOUND, off))) / (2 * BOUND), 1)

    mean = sum(map(abs, differences.values())) / len(differences)
    line = " ".join(f"{x(step)},{y(loss)}" for step, loss in sorted(ours.items()))
    dots = "".join(f'<circle cx="{x(step)}" cy="{y(loss)}" r="2.6"/>' for step, loss in sorted(other.items()))
    bars = "".join(f'<path d="M{x(step)} {z(0)}V{z(off)}"/>' for step, off in sorted(differences.items()))
    right = x(last)
    labels = [
        (left, top - 14, "start", title),
        (left, top + LOSS + DIFFERENCE + 40, "start", f"○ against — : mean difference {mean:.2f} %"),
        *((left - 6, y(loss) + 4, "end", f"{loss:.1f}") for loss in (low, high)),
        *((left - 6, z(off) + 4, "end", f"{off:+.0f} %" if off else "0") for off in (-BOUND, 0, BOUND)),
        (right, top + LOSS + DIFFERENCE + 40, "end", f"step {last}"),
    ]
    texts = "".join(f'<text x="{a}" y="{b}" text-anchor="{how}">{escape(text)}</text>' for a, b, how, text in labels)
    band = z(0.5)
    return (
        f'<g fill="#374151">{texts}</g><path d="M{left} {top}V{top + LOSS}H{right}" fill="none" stroke="#9ca3af"/>'
        f'<rect x="{left}" y="{band}" width="{round(right - left, 1)}" height="{round(z(-0.5) - band, 1)}" '
        'fill="#e5e7eb"/>'
        f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="1.5"/>'
        f'<g fill="none" stroke="{OTHER}">{dots}</g><g stroke="{OTHER}" stroke-width="3">{bars}</g>\n'
    )


if __name__ == "__main__":
    main()
