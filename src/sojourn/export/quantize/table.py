"""The measurements of a quantized model as rows: source, quantized, change."""

from __future__ import annotations

from typing import Any

HEADER = ("", "weights", "prefill", "decode", "perplexity")


def rows(measured: dict[str, Any], quantization: str) -> list[tuple[str, ...]]:
    source, found = measured["source"], measured["quantized"]
    table = [(f"source ({source['dtype']})", *_cells(source)), (quantization, *_cells(found))]
    change = [found[key] / source[key] - 1 for key in ("bytes", "prefill", "decode", "perplexity")]
    return [*table, ("change", *(f"{value:+.1%}" for value in change))]


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    speeds = (f"{one[key]:,.1f} tokens/s" for key in ("prefill", "decode"))
    return (f"{one['bytes'] / 2**20:,.1f} MiB", *speeds, f"{one['perplexity']:.4g}")


def caption(measured: dict[str, Any]) -> str:
    speed = f"; {measured['speed']}" if "speed" in measured else ""
    return f"{measured['device']}; perplexity on {measured['data']}, {measured['rows']} rows{speed}"


def lines(measured: dict[str, Any], quantization: str) -> list[str]:
    """For a terminal."""
    table = [HEADER, *rows(measured, quantization)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    shown = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    return [*shown, caption(measured)]


def markdown(measured: dict[str, Any], quantization: str) -> str:
    table = [HEADER, ("---",) * len(HEADER), *rows(measured, quantization)]
    body = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"## Beside its source\n\n{body}\n\n{caption(measured)}.\n"
