"""`sojourn generate`: one completion."""

from __future__ import annotations

import typer


def generate(
    model: str = typer.Argument(help="Name of a run, or folder of a model."),
    prompt: list[str] = typer.Option(..., "--prompt", "-p", help="Prompt. Repeatable."),
    max_tokens: int = typer.Option(128, "--max-tokens", "--max-new-tokens", min=1, help="Maximum new tokens."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 means greedy decoding."),
    top_p: float = typer.Option(1.0, min=0.01, max=1.0, help="Nucleus sampling: the probability mass to sample from."),
    seed: int = typer.Option(None, help="Random seed for sampling."),
    raw: bool = typer.Option(False, "--raw", help="Do not apply the chat template."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or mps."),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Generate a completion for each prompt."""
    from sojourn.infer.generate import SamplingParams, format_prompt
    from sojourn.infer.generate import generate as complete
    from sojourn.infer.load import load_model

    opened = load_model(model, device)
    texts = complete(
        opened, [format_prompt(opened, p, raw) for p in prompt], SamplingParams(max_tokens, temperature, top_p, seed)
    )
    if json:
        from json import dumps

        print(dumps([{"prompt": p, "text": t} for p, t in zip(prompt, texts, strict=True)], ensure_ascii=False))
        return
    for text in texts:
        print(text)
