"""`sojourn quantize`: a smaller model, with its size, speed and perplexity beside its source."""

from __future__ import annotations

import typer

from sojourn.cli.export import (
    AdapterOption,
    BaseOption,
    JsonOption,
    KeepRejectedOption,
    OutOption,
    OverwriteOption,
)
from sojourn.cli.model_args import CheckpointOption, ModelArg


def quantize(
    model: ModelArg,
    to: str = typer.Option(
        ..., "--to", metavar="KIND", help="int8, int8-dynamic, fp8, int4, nf4; for vLLM: gptq, awq, fp8-vllm."
    ),
    data: str | None = typer.Option(
        None, "--data", metavar="FILE",
        help="Measure perplexity on this file; default: the run's held-out rows.",
    ),
    out: OutOption = None,
    checkpoint: CheckpointOption = None,
    adapter: AdapterOption = None,
    base: BaseOption = None,
    overwrite: OverwriteOption = False,
    keep_rejected: KeepRejectedOption = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Quantize a model: adapters merged, the result replayed and measured beside its source.

    Examples: sojourn quantize small --to int8; sojourn quantize small --to gptq --data chats.jsonl
    """
    from sojourn.cli.export_output import ExportOutput
    from sojourn.export.export import ExportRequest, export
    from sojourn.export.quantize.kinds import find_kind, refuse_kind
    from sojourn.export.quantize.table import lines
    from sojourn.infer.adapter_weights import parse_adapters

    kind = find_kind(to)
    refuse_kind(kind)
    if data is not None:
        from sojourn.evals.held_out import check_source

        check_source(data)
    merged = parse_adapters(adapter or [])
    request = ExportRequest(
        model, kind.format, kind.name, out, checkpoint, merged, base, overwrite=overwrite,
        keep_rejected=keep_rejected, data=data,
    )  # fmt: skip
    with ExportOutput(json) as output:
        done = export(request, output)
        state = "written" if done.is_new else "was there already, from the same weights"
        table = lines(done.manifest["measured"], kind.name)
        end = [f"{done.path}: {state}", f"check it any time: sojourn verify {done.path}"]
        output.result({"path": str(done.path), "new": done.is_new, **done.manifest}, [*table, *end])
