"""`sojourn chat`: a conversation in the terminal."""

from __future__ import annotations

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


def chat(
    model: ModelArg,
    system: str = typer.Option("", help="System message."),
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    frequency_penalty: FrequencyOption = 0.0,
    presence_penalty: PresenceOption = 0.0,
    logit_bias: LogitBiasOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Chat with a model. /help lists commands: /reset /retry /system /temp /save /load /exit. Ctrl-C stops a reply."""
    from sojourn.errors import UserError
    from sojourn.infer.sampling import SamplingParams

    params = SamplingParams(
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty,
        read_logit_bias(logit_bias), read_stops(stop), 1, seed,
    )  # fmt: skip
    from sojourn.infer.chat import Chat
    from sojourn.infer.chat_terminal import ChatTerminal
    from sojourn.infer.generate import Generator
    from sojourn.infer.load import load_model

    opened = load_model(model, device, checkpoint)
    if not opened.is_chat:
        raise UserError(
            f"{opened.path}: trained on plain text, without chats; use: sojourn generate {model} --prompt TEXT"
        )
    ChatTerminal(Chat(Generator(opened, batch_size=1), params, system)).run()
