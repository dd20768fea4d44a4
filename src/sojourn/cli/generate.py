"""`sojourn generate`: a completion of each prompt."""

from __future__ import annotations

import typer

from sojourn.cli.model_args import CheckpointOption, DeviceOption, ModelArg


def generate(
    model: ModelArg,
    prompt: list[str] = typer.Option(..., "--prompt", "-p", help="Text to continue or to answer. Repeatable."),
    max_tokens: int = typer.Option(128, "--max-tokens", "--max-new-tokens", min=1, help="Maximum new tokens."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 means greedy decoding."),
    top_p: float = typer.Option(1.0, min=0.01, max=1.0, help="Nucleus sampling: the probability mass to sample from."),
    seed: int = typer.Option(None, help="Random seed for sampling."),
    raw: bool = typer.Option(False, "--raw", help="Continue the text as it is, without the chat template."),
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "auto",
    json: bool = typer.Option(
        False, "--json", help="Print JSON: prompt, text, finish_reason (stop or length), prompt_tokens, tokens."
    ),
) -> None:
    """Generate a completion for each prompt. A model that was trained on chats gets it as a user's message.

    An example: sojourn generate small --prompt "Once upon a time" --max-tokens 50
    """
    import sys
    from dataclasses import asdict

    from sojourn.infer.generate import SamplingParams, describe_cut, format_prompt
    from sojourn.infer.generate import generate as complete
    from sojourn.infer.load import load_model

    opened, params = load_model(model, device, checkpoint), SamplingParams(max_tokens, temperature, top_p, seed)
    completions = complete(opened, [format_prompt(opened, p, raw) for p in prompt], params)
    if json:
        from json import dumps

        rows = [{"prompt": p, **asdict(one)} for p, one in zip(prompt, completions, strict=True)]
        print(dumps(rows, ensure_ascii=False))
        return
    for number, (given, one) in enumerate(zip(prompt, completions, strict=True), 1):
        if len(prompt) > 1:
            print(f"{chr(10) if number > 1 else ''}[{number}] {' '.join(given.split())[:100]}")
        print(one.text, flush=True)
        cut = describe_cut(opened, one, params)
        if cut is not None:
            print(f"note: {f'[{number}] ' if len(prompt) > 1 else ''}{cut}", file=sys.stderr, flush=True)
