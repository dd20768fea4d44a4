"""The arguments of every verb that opens a model: which one, at which step, on which device."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArg = Annotated[
    str,
    typer.Argument(
        help="Name or folder of a run (RUN@STEP, RUN@best: one of its checkpoints); folder of a model, an adapter or a "
        "checkpoint; or a GGUF file. A run without a final model is opened at its newest checkpoint."
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="final|best|latest|STEP",
        help="Which model of a run; default: final, else latest.",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
