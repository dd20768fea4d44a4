"""`sojourn chat`: a conversation in the terminal."""

from __future__ import annotations

import typer

from sojourn.cli.model_args import CheckpointOption, DeviceOption, ModelArg


def chat(
    model: ModelArg,
    system: str = typer.Option(None, help="System message."),
    max_tokens: int = typer.Option(256, "--max-tokens", "--max-new-tokens", min=1, help="Maximum tokens per reply."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 means greedy decoding."),
    top_p: float = typer.Option(1.0, min=0.01, max=1.0, help="Nucleus sampling: the probability mass to sample from."),
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Chat with a model. /reset clears the conversation, /exit (or Ctrl-D) quits."""
    from sojourn.errors import UserError
    from sojourn.infer.generate import SamplingParams, describe_cut, reply
    from sojourn.infer.load import load_model

    opened = load_model(model, device, checkpoint)
    if not opened.is_chat:
        raise UserError(
            f"{opened.path}: trained on plain text, without chats; use: sojourn generate {model} --prompt TEXT"
        )
    start = [{"role": "system", "content": system}] if system else []
    turns, params = list(start), SamplingParams(max_tokens, temperature, top_p)
    print(f"{opened.path} · /reset clears the conversation, /exit quits")
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
            completion, forgotten = reply(opened, turns, params)
            turns.append({"role": "assistant", "content": completion.text})
            if forgotten:
                print(f"({forgotten} oldest turns no longer fit the model's context and were left out)")
            cut = describe_cut(opened, completion, params)
            if cut is not None:
                print(f"({cut})")
