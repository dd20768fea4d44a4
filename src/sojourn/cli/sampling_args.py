"""The sampling options of `generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "--max-new-tokens", min=1, help="Maximum new tokens.")]
TemperatureOption = Annotated[float, typer.Option(help="0 means greedy decoding.")]
TopPOption = Annotated[float, typer.Option(help="Nucleus sampling: the probability mass to sample from.")]
TopKOption = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")]
MinPOption = Annotated[
    float,
    typer.Option(help="Sample from tokens at least this likely, relative to the most likely one."),
]
RepetitionOption = Annotated[
    float, typer.Option(help="Divides the positive logits of tokens in prompt and answer (multiplies negative ones).")
]
FrequencyOption = Annotated[float, typer.Option(help="Subtracted from a token's logit for each time it was generated.")]
PresenceOption = Annotated[float, typer.Option(help="Subtracted from the logit of each token that was generated.")]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit, -100 to 100. Repeatable."),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help=r"The answer ends before this text. Repeatable; \n is a line feed."),
]
SeedOption = Annotated[int | None, typer.Option(help="Random seed for sampling.", show_default="drawn")]


def read_logit_bias(given: list[str] | None) -> Mapping[int, float]:
    bias = {}
    for one in given or ():
        token, _, value = one.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UserError(f"--logit-bias {one}: expected TOKEN_ID=BIAS, such as 198=-100") from None
    return bias


def read_stops(given: list[str] | None) -> tuple[str, ...]:
    r"""With \n, \t and \\ as a shell cannot easily write them."""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    stops = []
    for text in given or ():
        parts = text.split("\\\\")
        for name in ("n", "t", "r"):
            parts = [part.replace(f"\\{name}", escapes[name]) for part in parts]
        stops.append("\\".join(parts))
    return tuple(stops)
