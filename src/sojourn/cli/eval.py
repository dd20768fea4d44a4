"""`sojourn eval`: held-out loss and exact match."""

from __future__ import annotations

import typer

from sojourn.cli.model_args import CheckpointOption, DeviceOption, ModelArg


def evaluate(
    model: ModelArg,
    data: str | None = typer.Option(
        None, "--data", metavar="FILE", help="Score this file, folder or data set instead of the run's held-out rows."
    ),
    rows: int | None = typer.Option(None, min=1, help="Rows for the loss; default: train.eval_rows, or all of --data."),
    tasks: int | None = typer.Option(
        None, min=0, help="Built-in questions per family; default: 50, or none with --data. 0 skips them."
    ),
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "auto",
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Evaluate loss and perplexity on held-out rows or a file, and exact match on built-in questions.

    Examples: sojourn eval small; sojourn eval small --data test.jsonl
    """
    from dataclasses import asdict

    from sojourn.evals.held_out import answer_held_out_questions, check_source, exact_match, score_file, score_held_out
    from sojourn.infer.load import load_model

    if data is not None:
        check_source(data)
    opened = load_model(model, device, checkpoint)
    if tasks is None:
        tasks = 0 if data is not None else 50
    asks = tasks > 0 and opened.is_chat
    scores = score_held_out(opened, rows, required=not asks) if data is None else score_file(opened, data, rows)
    answers = answer_held_out_questions(opened, tasks) if asks else {}
    if json:
        from json import dumps

        found = {family: exact_match(of_family) for family, of_family in answers.items()}
        print(dumps({**(asdict(scores) if scores is not None else {}), "exact_match": found, "tasks": tasks}))
        return
    if scores is not None:
        what = "held-out loss" if data is None else f"{data}: loss"
        print(f"{what} {scores.loss:.4f}, perplexity {scores.perplexity:.2f} ({scores.rows:,} rows)")
    for family, of_family in answers.items():
        print(f"{family:<12} {exact_match(of_family):>6.1%} exact of {len(of_family)} held-out questions")
