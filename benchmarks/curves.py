"""Draws losses of our rows and of others of the same run over each other, with how far apart they are:
`python benchmarks/curves.py OUT.svg`. What was measured is in `results/`."""

from __future__ import annotations

import json
import sys
from collections import ChainMap
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FILES = tuple(f"train-H200-2026-11-{day}.json" for day in (15, 16, 17))
CALM = "train.lr=1e-4"
# What it is; its workload, steps, our row and the other, of the newest run that has both and was told so, or the newest
# that has each.
PANELS = (
    ("LoRA of 7B, nothing recomputed, and Liger", "lora-7b", 200, "ahead", "liger-kept", ""),
    ("QLoRA of 7B, all recomputed, and Liger", "qlora-7b", 200, "full", "liger", ""),
    ("All weights of 1.5B, and Liger", "full-1.5b", 200, "ahead", "liger", ""),
    ("875M, and transformers, compiled", "pretrain-875m", 200, "hopper", "transformers-compiled", "plain.json"),
    ("875M at 1e-4, and ours in 8 bits", "pretrain-875m", 500, "graphs", "fp8", CALM),
    ("875M at 1e-4, and in bf16 by other kernels", "pretrain-875m", 500, "graphs", "hopper", CALM),
    ("875M at 3e-4, and ours in 8 bits (on)", "pretrain-875m", 500, "graphs", "fp8", "log.every_steps=1"),
    ("875M at 3e-4, and ours in 8 bits (inner)", "pretrain-875m", 500, "graphs", "fp8-inner", "--out steep.json"),
    ("inner, the worst of four orders", "pretrain-875m", 500, "graphs", "fp8-inner", "train.seed=3"),
    ("875M at 3e-4, and ours in 8 bits (backward)", "pretrain-875m", 500, "graphs", "fp8-backward", "--out steep.json"),
    ("backward, the worst of four orders", "pretrain-875m", 500, "graphs", "fp8-backward", "train.seed=1"),
    ("875M at 3e-4, other texts, by other kernels", "pretrain-875m", 500, "graphs", "hopper", "--schedule cosine"),
    ("110M from scratch, and a Llama of 70 lines", "pretrain-110m", 200, "together", "plain", ""),
    ("110M from scratch, and ours in 8 bits", "pretrain-110m", 200, "graphs", "fp8", ""),
)
WIDTH, LOSS, APART, MARGIN, COLUMNS = 400, 170, 70, 46, 2
HEIGHT = LOSS + APART + 90
BOUND = 2.0  # per cent either way that the lower half shows
OURS, OTHER = "#2563eb", "#ea580c"

Curve = dict[int, float]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/curves.py OUT.svg")
    Path(sys.argv[1]).write_text(drawn(), encoding="utf-8")


def drawn() -> str:
    runs = [run for name in FILES for run in json.loads((RESULTS / name).read_text(encoding="utf-8"))["runs"]]
    width, height = COLUMNS * WIDTH, -(-len(PANELS) // COLUMNS) * HEIGHT
    panels = "".join(_panel(number, title, *_curves(runs, *which)) for number, (title, *which) in enumerate(PANELS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11"><title>Losses of the same steps on one H200</title>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{panels}</svg>\n'
    )


def _curves(
    runs: list[dict[str, Any]], workload: str, steps: int, ours: str, other: str, told: str
) -> tuple[Curve, Curve]:
    fitting = [
        {row["name"]: row["losses"] for row in found["rows"]}
        for run in reversed(runs) if run["steps"] == steps and told in run["command"]
        for found in run["workloads"] if found["workload"] == workload
    ]  # fmt: skip
    both = next((losses for losses in fitting if {ours, other} <= set(losses)), ChainMap(*fitting))
    if not {ours, other} <= set(both):
        sys.exit(f"no run of {workload} with {steps} steps has {ours} and {other}")
    return _tenths(both[ours]), _tenths(both[other])


def _tenths(losses: dict[str, float]) -> Curve:
    """Every tenth, as most runs keep them."""
    return {int(step): loss for step, loss in losses.items() if step == "1" or int(step) % 10 == 0}


def _panel(number: int, title: str, ours: Curve, other: Curve) -> str:
    left, top = number % COLUMNS * WIDTH + MARGIN, number // COLUMNS * HEIGHT + 34
    last, values = max(ours), [*ours.values(), *other.values()]
    low, high = min(values), max(values)
    apart = {step: 100 * (loss / ours[step] - 1) for step, loss in other.items() if step in ours}

    def x(step: int) -> float:
        return round(left + (WIDTH - MARGIN - 20) * step / last, 1)

    def y(loss: float) -> float:
        return round(top + LOSS * (high - loss) / (high - low), 1)

    def z(off: float) -> float:
        return round(top + LOSS + 24 + APART * (BOUND - max(-BOUND, min(BOUND, off))) / (2 * BOUND), 1)

    mean = sum(map(abs, apart.values())) / len(apart)
    line = " ".join(f"{x(step)},{y(loss)}" for step, loss in sorted(ours.items()))
    dots = "".join(f'<circle cx="{x(step)}" cy="{y(loss)}" r="2.6"/>' for step, loss in sorted(other.items()))
    bars = "".join(f'<path d="M{x(step)} {z(0)}V{z(off)}"/>' for step, off in sorted(apart.items()))
    right = x(last)
    said = [
        (left, top - 14, "start", title),
        (left, top + LOSS + APART + 40, "start", f"○ against — : {mean:.2f} % apart in the mean"),
        *((left - 6, y(loss) + 4, "end", f"{loss:.1f}") for loss in (low, high)),
        *((left - 6, z(off) + 4, "end", f"{off:+.0f} %" if off else "0") for off in (-BOUND, 0, BOUND)),
        (right, top + LOSS + APART + 40, "end", f"step {last}"),
    ]
    words = "".join(f'<text x="{a}" y="{b}" text-anchor="{how}">{escape(text)}</text>' for a, b, how, text in said)
    band = z(0.5)
    return (
        f'<g fill="#374151">{words}</g><path d="M{left} {top}V{top + LOSS}H{right}" fill="none" stroke="#9ca3af"/>'
        f'<rect x="{left}" y="{band}" width="{round(right - left, 1)}" height="{round(z(-0.5) - band, 1)}" '
        'fill="#e5e7eb"/>'
        f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="1.5"/>'
        f'<g fill="none" stroke="{OTHER}">{dots}</g><g stroke="{OTHER}" stroke-width="3">{bars}</g>\n'
    )


if __name__ == "__main__":
    main()
