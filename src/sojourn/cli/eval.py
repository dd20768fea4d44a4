"""`sojourn eval`: losses, questions and lm-eval tasks, of one model or several side by side."""

from __future__ import annotations

import typer

from sojourn.cli.model_args import CheckpointOption, DeviceOption
from sojourn.expand_user import expand_user


def evaluate(
    models: list[str] = typer.Argument(
        ..., help="Runs, folders of models, adapters or checkpoints, GGUF files. The first is what others differ from."
    ),
    data: list[str] | None = typer.Option(
        None, "--data", metavar="FILE", help="Loss, perplexity and bits per byte of a file or data set. Repeatable."
    ),
    task: list[str] | None = typer.Option(
        None, "--task", metavar="FILE", help="A JSONL file of questions: see docs/eval.md. Repeatable."
    ),
    lm_eval: str | None = typer.Option(
        None, "--lm-eval", metavar="TASKS", help="Tasks of lm-eval, or YAML files of tasks, between commas."
    ),
    limit: int | None = typer.Option(None, min=1, help="Questions of each lm-eval task."),
    rows: int | None = typer.Option(None, min=1, help="Rows for the loss; default: train.eval_rows, or all of --data."),
    questions: int | None = typer.Option(
        None, "--questions", "--tasks", min=0, help="Built-in questions per family; default: 50, or none with others."
    ),
    max_tokens: int = typer.Option(128, min=1, help="Maximum tokens of a reply to a question."),
    checkpoint: CheckpointOption = None,
    checkpoints: str | None = typer.Option(
        None, "--checkpoints", metavar="all|STEP,STEP", help="Several checkpoints of each run, plotted over steps."
    ),
    device: DeviceOption = "auto",
    json: bool = typer.Option(False, "--json", help="Print JSON."),
    html: str | None = typer.Option(None, "--html", metavar="FILE", help="Write a page with tables and plots."),
    svg: str | None = typer.Option(None, "--svg", metavar="FILE", help="Write the plots."),
) -> None:
    """Evaluate models: held-out loss, any data set, questions of your own, lm-eval; with 95 % confidence intervals.

    Examples: sojourn eval small; sojourn eval base.gguf small --task questions.jsonl --html report.html
    """

    from sojourn.evals.compare import compare
    from sojourn.evals.held_out import check_source
    from sojourn.evals.lm_eval_tasks import check_lm_eval
    from sojourn.evals.report import as_html, as_json, as_lines, as_svg
    from sojourn.evals.run_eval import EvalJob, choose_models, run_eval
    from sojourn.evals.task_file import read_questions
    from sojourn.run.output import print_json
    from sojourn.storage.files import write_text

    for path in data or ():
        check_source(path)
    asked = [question for path in task or () for question in read_questions(path)]
    names = [name.strip() for name in (lm_eval or "").split(",") if name.strip()]
    if names:
        check_lm_eval(names)
    job = EvalJob(data or (), asked, names, rows, questions, max_tokens, device, limit)
    results = compare(run_eval(choose_models(models, checkpoint, checkpoints), job))
    title = f"sojourn eval {' '.join(models)}"
    for file, write in ((html, as_html), (svg, as_svg)):
        if file is not None:
            write_text(expand_user(file), write(results, title))
    if json:
        print_json({"results": as_json(results)})
        return
    for line in as_lines(results):
        print(line)
    for file in filter(None, (html, svg)):
        print(f"written to {file}")
