"""`sojourn report`: a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.", show_default=False)],
    out: Path | None = typer.Option(
        None, "--out", "-o", metavar="FILE", help="Default: RUN.html here.", show_default=False
    ),
    language: str = typer.Option("en", "--language", metavar="en|zh", help="Of its headings."),
) -> None:
    """Write a run as one HTML file that opens anywhere: curves, settings, samples, events."""
    from sojourn.board.report import LANGUAGES, report_html
    from sojourn.errors import UserError
    from sojourn.run.home import find_run
    from sojourn.storage.files import write_text

    if language not in LANGUAGES:
        raise UserError(f"--language: “{language[:20]}” given; allowed: {', '.join(LANGUAGES)}")
    found = find_run(run)
    file = out or Path(f"{found.path.name}.html")
    if file.is_dir():
        raise UserError(f"{file}: a folder; name a file: --out {file / (found.path.name + '.html')}")
    write_text(file, report_html(found, language))
    print(f"{file} written")
