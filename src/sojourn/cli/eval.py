"""`sojourn eval`: held-out loss and exact match."""

from __future__ import annotations

import typer


def evaluate(
    model: str = typer.Argument(help="Name of a run, or folder of a model."),
    tasks: int = typer.Option(50, min=0, help="Held-out questions per family; 0 skips them."),
    rows: int = typer.Option(64, min=1, help="Held-out rows for the loss (runs only)."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or mps."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Evaluate loss and perplexity on the run's held-out rows, and exact match on built-in questions."""
    import math

    from sojourn.evals.held_out import answer_held_out_questions, exact_match, held_out_loss
    from sojourn.infer.load import find_model_path, load_model
    from sojourn.run.folder import RunFolder

    opened = load_model(model, device)
    run = RunFolder(find_model_path(model).parent)
    loss = held_out_loss(opened, run, rows) if run.exists() else math.nan
    answers = answer_held_out_questions(opened, tasks) if tasks and opened.is_chat else {}
    if json:
        from json import dumps

        known = {} if math.isnan(loss) else {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        print(
            dumps(
                {
                    **known,
                    "exact_match": {family: exact_match(found) for family, found in answers.items()},
                    "tasks": tasks,
                }
            )
        )
        return
    if not math.isnan(loss):
        print(f"held-out loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.2f}")
    for family, found in answers.items():
        print(f"{family:<12} {exact_match(found):>6.1%} exact of {len(found)} held-out questions")
