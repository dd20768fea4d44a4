"""`sojourn prepare`: turn sources into tokens once, on any machine, and show what the model will see."""

from __future__ import annotations

import sys
from typing import Any

import typer


def prepare(
    words: list[str] = typer.Argument(
        metavar="RUN [key=value]... [--flag value]...", help="A preset or a YAML file, then overrides."
    ),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte of what is prepared and check it."),
) -> None:
    """Read, recognise, render, mask, tokenise and pack a run's data; trains the tokenizer if the run has none.

    Sources (data.sources, --train_file, --dataset) are files (.txt .md .json .jsonl .csv .tsv .parquet, also .gz and
    .zst), folders, globs, data sets of the hub by name (wikitext2, ORG/NAME) and builtin:text, builtin:instructions.
    Texts, Alpaca, ShareGPT, messages, prompt/completion, question/answer and preference pairs are recognised; for
    other columns say data.columns.text=NAME or data.columns.prompt=NAME data.columns.completion=NAME.
    """
    from sojourn.config.load import load_run
    from sojourn.data.prepare import prepare_run
    from sojourn.data.report import format_report, print_examples
    from sojourn.errors import RunFailed
    from sojourn.run.home import prepared_folder

    config = load_run(words).config
    shown = False

    def say(line: str) -> None:
        if not json:
            print(line, flush=True)

    def show(formats: list[tuple[str, str]], examples: list[dict[str, Any]]) -> None:
        nonlocal shown
        shown = True
        print_examples(say, sys.stdout.isatty(), formats, examples)

    artefact = prepare_run(config, prepared_folder(), say, show)
    if verify and (damaged := artefact.damaged_files()):
        raise RunFailed(f"{artefact.path}: damaged: {', '.join(damaged)}; remove that folder and run this again")
    report = artefact.report
    if json:
        from json import dumps

        steps = -(-report["train"]["rows"] // config.train.global_batch)
        facts = {"path": str(artefact.path), **artefact.facts, **report, "steps_per_epoch": steps}
        print(dumps(facts, ensure_ascii=False))
        return
    if not shown:
        show([(one["name"], one["format"]) for one in report["sources"]], report["examples"])
    for line in format_report(report, config.train.global_batch):
        print(line)
    print(f"in {artefact.path} (plot: report.svg)")
