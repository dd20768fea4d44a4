"""K-quants: llama.cpp's library quantizes a GGUF file, with an importance matrix where the run's data is here."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sojourn.errors import UserError
from sojourn.export.gguf.importance import importance_matrix
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.stage import ExportStage
from sojourn.infer.runtimes.llamacpp import threads
from sojourn.infer.runtimes.llamacpp_process import LlamaCpp, unavailable

K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")


def require_llama_cpp(quantization: str) -> None:
    reason = unavailable()
    if reason:
        raise UserError(
            f"--quantize {quantization}: K-quants are made by llama.cpp's library: {reason}; or use q4_0 or q8_0"
        )


def quantize_file(
    source: Source, stage: ExportStage, unquantized: str, name: str, quantization: str, progress: Progress
) -> None:
    """`unquantized` and `name`: files of the stage."""
    from gguf import LlamaFileType

    kind = int(LlamaFileType[f"MOSTLY_{quantization.upper()}"])
    matrix = importance_matrix(source, progress)
    progress.say(f"llama.cpp quantizes {unquantized} to {quantization.upper()}")
    with tempfile.TemporaryDirectory(prefix="sojourn-") as folder:
        given = {}
        if matrix is not None:
            file = Path(folder) / "importance"
            with file.open("wb") as out:
                for values in matrix.values():
                    out.write(values.numpy().tobytes())
            given["importance"] = {"file": str(file), "names": [(key, len(v)) for key, v in matrix.items()]}

        def run(target: Path) -> None:
            child = LlamaCpp(name)
            try:
                paths = {"source": str(stage.path / unquantized), "target": str(target)}
                child.ask("quantize", kind=kind, threads=threads(), **paths, **given)
            finally:
                child.close()

        stage.file(name, run)
