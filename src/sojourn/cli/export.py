"""`sojourn export`: a model in another format, replayed beside its source before it is put in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.cli.model_args import CheckpointOption, ModelArg

if TYPE_CHECKING:
    from sojourn.export.export import ExportRequest

OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder to write. Default: exports/NAME-FORMAT.", show_default=False),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", metavar="DIR[=WEIGHT]", help="Merge this adapter (a folder or a run) too. Repeatable.",
        show_default=False,
    ),
]  # fmt: skip
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="DIR", help="The adapter's base, where it is not where the adapter says.", show_default=False
    ),
]
CombineOption = Annotated[str, typer.Option("--combine", metavar="linear|ties|dare", help="How several adapters add.")]
DensityOption = Annotated[
    float | None,
    typer.Option(
        min=0.0001, max=1.0, help="The share of an adapter's changes that is kept. Default: ties 0.2, dare 0.1.",
        show_default=False,
    ),
]  # fmt: skip
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")]
KeepRejectedOption = Annotated[
    bool, typer.Option("--keep-rejected", help="Keep an export that differs from its source, as DIR.rejected.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")]


def export(
    model: ModelArg,
    to: str = typer.Option("hf", "--to", metavar="FORMAT", help="hf, gguf, gguf-adapter, onnx, mlx or vllm."),
    quantize: str | None = typer.Option(
        None, "--quantize", "--quantise", metavar="Q", help="bf16, q8_0, q4_k_m, int8, …: a name that the format has."
    ),
    out: OutOption = None,
    checkpoint: CheckpointOption = None,
    adapter: AdapterOption = None,
    base: BaseOption = None,
    combine: CombineOption = "linear",
    density: DensityOption = None,
    overwrite: OverwriteOption = False,
    keep_rejected: KeepRejectedOption = False,
    json: JsonOption = False,
) -> None:
    """Export a model: adapters merged, files hashed, and the result replayed beside its source. What differs is not
    written. Interrupted, the same command goes on where it was.

    Examples: sojourn export small --to gguf --quantize q8_0; sojourn export small --checkpoint best
    """
    from sojourn.export.combine import parse_combine
    from sojourn.export.export import ExportRequest
    from sojourn.infer.adapter_weights import parse_adapters

    merged, how = parse_adapters(adapter or []), parse_combine(combine, density)
    request = ExportRequest(model, to, quantize, out, checkpoint, merged, base, how, overwrite, keep_rejected)
    run_export(request, json)


def run_export(request: ExportRequest, json: bool) -> None:
    """Shared with `merge`."""
    from sojourn.cli.export_output import ExportOutput
    from sojourn.export.export import export as run

    with ExportOutput(json) as output:
        done = run(request, output)
        facts = {"path": str(done.path), "new": done.is_new, **done.manifest}
        size = sum(one["size"] for one in done.manifest["files"].values()) / 2**30
        state = "written" if done.is_new else "was there already, from the same weights"
        lines = [f"{done.path}: {state} ({size:.2f} GiB)", f"check it any time: sojourn verify {done.path}"]
        output.result(facts, lines)
