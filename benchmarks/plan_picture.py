"""Draws what `sojourn plan` prints: `python benchmarks/plan_picture.py`, for README.

The command runs as a user types it; its output becomes docs/images/plan.svg, which looks like a terminal.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from unicodedata import east_asian_width

COMMAND = "sojourn plan qlora-7b train.steps=1000"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "plan.svg"
COLUMNS = 118
CHARACTER, LINE, SIZE, MARGIN, BAR = 8.4, 20, 14, 20, 34  # pixels
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Noto Sans Mono CJK SC', monospace"
BACKGROUND, TEXT, DIM, PROMPT = "#0d1117", "#e6edf3", "#8b949e", "#7ee787"
BUTTONS = ("#ff5f57", "#febc2e", "#28c840")


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)


def draw() -> str:
    lines = [f"$ {COMMAND}", *shorten(output())]
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), BAR + MARGIN + LINE * len(lines)
    buttons = "".join(
        f'<circle cx="{MARGIN + 20 * n}" cy="{BAR // 2 + 3}" r="6" fill="{c}"/>' for n, c in enumerate(BUTTONS)
    )
    rows = "".join(_row(number, line) for number, line in enumerate(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'font-family="{FONTS}" font-size="{SIZE}"><title>{escape(COMMAND)}</title>'
        f'<rect width="{width}" height="{height}" rx="10" fill="{BACKGROUND}"/>{buttons}\n{rows}</svg>\n'
    )


def output() -> list[str]:
    """What the command prints, away from the user's own catalogue and calibration."""
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "SOJOURN_HOME": home, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-m", *shlex.split(COMMAND)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8", env=env, cwd=home)
    return done.stdout.rstrip().splitlines()


def shorten(lines: list[str]) -> list[str]:
    """Memory, the table and the choice; not the sources of prices and the GPUs without one."""
    table_end = next(number for number, line in enumerate(lines) if line.startswith("prices"))
    choice = [line for line in lines[table_end:] if line.startswith(("cheapest", "fastest"))]
    return [*lines[:table_end], "…", *choice]


def _row(number: int, line: str) -> str:
    """One line; runs of non-space text are placed one by one, since fonts differ in the width of a character."""
    y = BAR + LINE * number + SIZE
    color = PROMPT if number == 0 else DIM if line == "…" else TEXT
    parts, column, start, text = [], 0, 0, ""
    for character in f"{line} ":
        if character == " ":
            if text:
                x = round(MARGIN + start * CHARACTER, 1)
                fit = f'textLength="{round((column - start) * CHARACTER, 1)}" lengthAdjust="spacingAndGlyphs"'
                parts.append(f'<tspan x="{x}" {fit}>{escape(text)}</tspan>')
            text, start = "", column + 1
        else:
            text += character
        column += 2 if east_asian_width(character) in "WF" else 1
    return f'<text y="{y}" fill="{color}">{"".join(parts)}</text>\n' if parts else ""


if __name__ == "__main__":
    main()
