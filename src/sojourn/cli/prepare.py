"""`sojourn prepare`: tokenizes and packs a run's data once, and shows what the model will see."""

from __future__ import annotations

import sys
from typing import Any

import typer

from sojourn.cli.run_args import RunArgs


def prepare(
    args: RunArgs,
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    verify: bool = typer.Option(False, "--verify", help="Check every byte of the prepared data."),
) -> None:
    """Read, tokenize, mask and pack a run's data. Trains a tokenizer if the run has none.

    An example: sojourn prepare small --train_file my.jsonl

    Sources (--train_file, --dataset, data.sources): files, folders, globs,
    Hugging Face data sets (wikitext2, ORG/NAME), builtin:text, builtin:instructions.
    File types: .txt .md .json .jsonl .csv .tsv .parquet, also .gz and .zst.
    Formats are detected: text, Alpaca, ShareGPT, messages, prompt/completion,
    question/answer, preference pairs. For other columns: data.columns.text=NAME,
    or data.columns.prompt=NAME data.columns.completion=NAME.

    Held out for evaluation: 1 % of the documents; --val_size 0.1 (a share) or 100
    (documents); or a file of your own: --val_file FILE.

    The result is kept in prepared/, where train finds it. --output_dir FOLDER leaves
    train.jsonl, validation.jsonl and tokenizer.model there, too.
    """
    from pathlib import Path

    from sojourn.config.command_line import is_typed
    from sojourn.config.load import load_run
    from sojourn.data.output_folder import check_output_folder, write_output_folder
    from sojourn.data.prepare import prepare_run
    from sojourn.data.report import format_report, print_examples
    from sojourn.errors import RunFailed
    from sojourn.run.home import prepared_folder

    loaded = load_run(args)
    config, shown = loaded.config, False
    output = Path(str(config.save.folder)) if is_typed(args, ("save", "folder")) else None
    if output is not None:
        check_output_folder(config, output)

    def say(line: str) -> None:
        if not json:
            print(line, flush=True)

    def show(formats: list[tuple[str, str]], examples: list[dict[str, Any]]) -> None:
        nonlocal shown
        shown = True
        print_examples(say, sys.stdout.isatty(), formats, examples)

    for note in loaded.notes:
        say(f"note: {note}")
    artefact = prepare_run(config, prepared_folder(), say, show)
    if verify and (damaged := artefact.damaged_files()):
        raise RunFailed(f"{artefact.path}: damaged: {', '.join(damaged)}; remove that folder and run this again")
    if output is not None:
        write_output_folder(config, artefact, output, say)
    report = artefact.report
    if json:
        from sojourn.run.output import print_json

        steps = -(-report["train"]["rows"] // config.train.global_batch)
        facts = {"path": str(artefact.path), **artefact.facts, **report, "steps_per_epoch": steps}
        print_json(facts)
        return
    if not shown:
        show([(one["name"], one["format"]) for one in report["sources"]], report["examples"])
    for line in format_report(report, config.train.global_batch):
        print(line)
    print(f"in {artefact.path} (plot: report.svg)")
