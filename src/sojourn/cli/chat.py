"""`sojourn chat`: a conversation in the terminal."""

from __future__ import annotations

import typer


def chat(
    model: str = typer.Argument(help="A run's name, or the folder of a model."),
    system: str = typer.Option(None, help="A system message."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="At most this many tokens a reply."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 always takes the likeliest token."),
    top_p: float = typer.Option(
        1.0, min=0.01, max=1.0, help="Sample from the likeliest tokens that add up to this share."
    ),
    device: str = typer.Option("auto", help="auto, cpu, cuda or mps."),
) -> None:
    """Talk to a model. /reset forgets the conversation, /exit (or Ctrl-D) leaves."""
    from sojourn.errors import UserError
    from sojourn.infer.generate import SamplingParams, reply
    from sojourn.infer.load import load_model

    opened = load_model(model, device)
    if not opened.is_chat:
        raise UserError(
            f"{opened.path}: trained on plain text, without chats; use: sojourn generate {model} --prompt TEXT"
        )
    start = [{"role": "system", "content": system}] if system else []
    turns = list(start)
    print(f"{opened.path} · /reset forgets, /exit leaves")
    while True:
        try:
            line = input("you: ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            turns = list(start)
        elif line:
            turns.append({"role": "user", "content": line})
            print("model: ", end="", flush=True)
            turns.append(
                {"role": "assistant", "content": reply(opened, turns, SamplingParams(max_tokens, temperature, top_p))}
            )
