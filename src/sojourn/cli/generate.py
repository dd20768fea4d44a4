"""`sojourn generate`: completions of prompts, of which a file may have many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from sojourn.cli.model_args import CheckpointOption, DeviceOption, ModelArg
from sojourn.cli.sampling_args import (
    FrequencyOption,
    LogitBiasOption,
    MaxTokensOption,
    MinPOption,
    PresenceOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    read_logit_bias,
    read_stops,
)
from sojourn.expand_user import expand_user

if TYPE_CHECKING:
    from sojourn.infer.generate_rows import RowsJob
    from sojourn.infer.load import LoadedModel
    from sojourn.infer.sampling import SamplingParams


def generate(
    model: ModelArg,
    prompt: list[str] | None = typer.Option(
        None, "--prompt", "-p", help="Text to continue or to answer. Repeatable.", show_default=False
    ),
    prompts: str | None = typer.Option(
        None,
        "--prompts",
        metavar="FILE",
        help="A file of prompts: .txt with one a line, or .jsonl with prompt or messages; other columns are kept.",
    ),
    out: str | None = typer.Option(
        None, "--out", "-o", metavar="FILE", help="Write JSONL there. After a kill, run the same command to go on."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a file that other settings made."),
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    frequency_penalty: FrequencyOption = 0.0,
    presence_penalty: PresenceOption = 0.0,
    logit_bias: LogitBiasOption = None,
    stop: StopOption = None,
    n: int = typer.Option(1, "--n", "-n", help="Completions of each prompt."),
    seed: SeedOption = None,
    batch_size: int | None = typer.Option(
        None, min=1, help="Prompts at a time; default: 64, or what fits the memory.", show_default=False
    ),
    raw: bool = typer.Option(False, "--raw", help="Continue the text as it is, without the chat template."),
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "auto",
    json: bool = typer.Option(
        False, "--json", help="Print JSON: prompt, completion, finish_reason (stop or length), prompt_tokens, tokens."
    ),
) -> None:
    """Generate completions. A model that was trained on chats gets a prompt as a user's message.

    Examples:

    sojourn generate small --prompt "Once upon a time" --max-tokens 50

    sojourn generate small --prompts questions.jsonl --out answers.jsonl --temperature 0.7 --seed 1
    """
    from sojourn.errors import UserError
    from sojourn.infer.sampling import SamplingParams

    params = SamplingParams(
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty,
        read_logit_bias(logit_bias), read_stops(stop), n, seed,
    )  # fmt: skip
    if bool(prompt) == bool(prompts):
        raise UserError("give either --prompt TEXT (repeatable) or --prompts FILE")
    from sojourn.infer.generate_rows import RowsJob, check_rows, print_rows, rows_of, write_rows
    from sojourn.infer.load import load_model

    read, source = rows_of(prompt, prompts, out)
    job, total = RowsJob(read, source, params, raw, batch_size), check_rows(read())
    opened = load_model(model, device, checkpoint)
    if out is not None:
        write_rows(opened, job, total, model, expand_user(out), overwrite)
    elif prompts is not None:
        print_rows(opened, job, total)
    else:
        _print(opened, job, prompt or (), params, json)


def _print(opened: LoadedModel, job: RowsJob, prompts: Sequence[str], params: SamplingParams, json: bool) -> None:
    import sys

    from sojourn.infer.generate import Generator
    from sojourn.infer.generate_rows import complete
    from sojourn.run.output import print_json, terminal_text

    generator = Generator(opened, job.batch_size)
    completions, rows = complete(generator, job)
    if json:
        print_json(rows)
        return
    given = [one for one in prompts for _ in range(params.n)]
    for number, (text, one) in enumerate(zip(given, completions, strict=True), 1):
        if len(given) > 1:
            print(f"{chr(10) if number > 1 else ''}[{number}] {' '.join(text.split())[:100]}")
        print(terminal_text(one.text), flush=True)
        cut = generator.describe_cut(one, params)
        if cut is not None:
            print(f"note: {f'[{number}] ' if len(given) > 1 else ''}{cut}", file=sys.stderr, flush=True)
