"""`sojourn merge`: adapters merged into their base, as a folder that plain transformers opens."""

from __future__ import annotations

import typer

from sojourn.cli.export import (
    BaseOption,
    CombineOption,
    DensityOption,
    JsonOption,
    KeepRejectedOption,
    OutOption,
    OverwriteOption,
    run_export,
)
from sojourn.cli.model_args import CheckpointOption, ModelArg


def merge(
    model: ModelArg,
    adapters: list[str] | None = typer.Argument(
        None, metavar="[ADAPTER[=WEIGHT]]...", help="Further adapters: folders or runs.", show_default=False
    ),
    out: OutOption = None,
    checkpoint: CheckpointOption = None,
    base: BaseOption = None,
    combine: CombineOption = "linear",
    density: DensityOption = None,
    dtype: str | None = typer.Option(None, "--dtype", help="bf16, fp16 or fp32; default: that of the base."),
    overwrite: OverwriteOption = False,
    keep_rejected: KeepRejectedOption = False,
    json: JsonOption = False,
) -> None:
    """Merge adapters into their base: LoRA, rsLoRA, DoRA, QLoRA (into the unquantized base), one or several. The base
    is read and written piece by piece, so the memory of a laptop is enough for any size.

    Examples: sojourn merge my-lora; sojourn merge BASE one=0.7 two=0.3 --combine ties
    """
    from sojourn.export.combine import parse_combine
    from sojourn.export.export import ExportRequest
    from sojourn.infer.adapter_weights import parse_adapters

    merged, how = parse_adapters(adapters or []), parse_combine(combine, density)
    request = ExportRequest(model, "hf", dtype, out, checkpoint, merged, base, how, overwrite, keep_rejected)
    run_export(request, json)
