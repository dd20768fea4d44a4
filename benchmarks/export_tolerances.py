"""How far a healthy export is from its source, in every format, and how far one with a planted fault: the figures that
`export/tolerances.py` rests on.

    python benchmarks/export_tolerances.py MODEL [--formats gguf:q4_0,onnx:int8] [--faults] [--out FILE]

Every export is written to a temporary folder and replayed in the first runtime of its format that runs here.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.export.formats import FORMATS
from sojourn.export.gate import check
from sojourn.export.open_source import Source, open_weights
from sojourn.export.progress import NoProgress
from sojourn.export.reference import Reference
from sojourn.export.source_reference import source_reference
from sojourn.export.stage import ExportStage
from sojourn.export.tolerances import Tolerance
from sojourn.export.weights_check import relative_error
from sojourn.infer.runtimes.registry import available, open_runtime, refusal

if TYPE_CHECKING:
    from torch import Tensor

ANYTHING = Tolerance(*[math.inf] * 5)
LAYER = "model.layers."


class Faulty:
    """A model's weights with a fault."""

    def __init__(self, source: Source, fault: str) -> None:
        self._weights, self._fault = source.weights, fault
        text = source.weights.config
        self._heads = {"q_proj": text["num_attention_heads"], "k_proj": text["num_key_value_heads"]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def load(self, name: str) -> Tensor:
        middle = int(self._weights.config["num_hidden_layers"]) // 2
        where = f"{LAYER}{middle}."
        swapped = {
            "swapped layers": (f"{where}mlp.up_proj.weight", f"{LAYER}{middle - 1}.mlp.up_proj.weight"),
            "swapped gate and up": (f"{where}mlp.up_proj.weight", f"{where}mlp.gate_proj.weight"),
            "swapped k and v": (f"{where}self_attn.k_proj.weight", f"{where}self_attn.v_proj.weight"),
            "swapped norms": (f"{where}input_layernorm.weight", f"{where}post_attention_layernorm.weight"),
        }.get(self._fault, ())
        if name in swapped:
            return self._weights.load(swapped[1 - swapped.index(name)])
        found = self._weights.load(name)
        if self._fault == "rounded base" and found.ndim == 2:
            return _rounded(found)
        is_in = name.startswith(where) if self._fault.endswith("one layer") else self._fault.startswith("unpermuted")
        kind = next((one for one in self._heads if one in name), None)
        return _interleaved(found, self._heads[kind]) if is_in and kind else found

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.load(name)[start:stop]


FAULTS = (
    "unpermuted", "unpermuted one layer", "swapped layers", "swapped gate and up", "swapped k and v", "swapped norms",
    "rounded base",
)  # fmt: skip


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    count, columns = rows.shape
    return rows.view(heads, 2, count // heads // 2, columns).transpose(1, 2).reshape(count, columns)


def _rounded(tensor: Tensor) -> Tensor:
    """As if it had been 4-bit when the adapter was merged."""
    import gguf
    import torch

    kind = gguf.GGMLQuantizationType.Q4_0
    written = gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), kind), kind)
    return torch.from_numpy(written).reshape(tensor.shape).to(tensor.dtype)


def measure(source: Source, reference: Reference, name: str, quantization: str, greedy: bool) -> dict[str, Any]:
    """One export and its replay."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with ExportStage(Path(folder) / "export", "measured") as stage:
            FORMATS[name].writer()(source, stage, quantization, NoProgress())
            path = stage.finish({"format": name, "quantization": quantization})
        found["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        usable = (one for one in FORMATS[name].runtimes if not available(one) and not refusal(one, path))
        runtime_name = next(usable, None)
        if runtime_name is None:
            return {**found, "runtime": "none"}
        with open_runtime(runtime_name, path) as runtime:
            if not greedy:
                runtime.greedy = lambda *_: None  # type: ignore[method-assign]
            replay = check(reference, runtime, ANYTHING)
            found |= {
                "runtime": runtime_name,
                "differences": [str(one) for one in replay.differences],
                **replay.figures,
            }
            found["gaps"] = replay.gaps[:4]
        reader = runtime_name if name != "gguf" else "transformers"
        with open_runtime(reader, path) as runtime:
            loaded = runtime.weights()
            if loaded is not None:
                found["weights"] = _worst_tensors(source, dict(loaded))
    return found


def _worst_tensors(source: Source, loaded: dict[str, Tensor]) -> list[tuple[float, str]]:
    """Against the healthy weights, where these are faulty."""
    weights = getattr(source.weights, "_weights", source.weights)
    errors = [(relative_error(loaded[n].float(), weights.load(n).float()), n) for n in weights.names()]
    return sorted(errors, reverse=True)[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--formats", default="", help="format:quantization, comma separated; default: all")
    parser.add_argument("--faults", action="store_true", help="planted faults too")
    parser.add_argument("--greedy", action="store_true", help="greedy text too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wanted = [tuple(one.split(":")) for one in args.formats.split(",") if one]
    wanted = wanted or [(one.name, q) for one in FORMATS.values() for q in one.quantizations]
    source = open_weights(args.model)
    reference = source_reference(source, print)
    rows = []
    for name, quantization in wanted:
        for fault in ("", *(FAULTS if args.faults else ())):
            given = replace(source, weights=Faulty(source, fault)) if fault else source
            try:
                row = measure(given, reference, name, quantization, args.greedy)
            except Exception as error:
                row = {"failed": f"{type(error).__name__}: {error}"[:200]}
            rows.append({"format": name, "quantization": quantization, "fault": fault, **row})
            print(json.dumps(rows[-1]), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
