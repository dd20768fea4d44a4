"""W4A16 and FP8 models for vLLM (compressed-tensors), quantized by llm-compressor in a child process, which has an
environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed
from sojourn.export import hf
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.export.quantize.calibration import calibration_rows
from sojourn.export.quantize.kinds import KINDS, refuse_kind
from sojourn.export.quantize.plain_folder import dtype_name, plain_folder
from sojourn.export.quantize.write import group_size, quantizing_device
from sojourn.export.stage import ExportStage
from sojourn.export.vllm_folder import write_tokenizer
from sojourn.export.vllm_preflight import config_for_vllm, model_problems, refuse
from sojourn.infer.runtimes.managed_environment import LLM_COMPRESSOR, clean_environment, ends_with_parent, error_line
from sojourn.storage.files import read_json_object, write_json

_CHILD = Path(__file__).with_name("llm_compressor_child.py")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_CALIBRATED = ("gptq", "awq")


def check(source: Source, progress: Progress) -> None:
    """Before anything is computed."""
    refuse(model_problems(source.weights), "for vLLM")


def write(source: Source, stage: ExportStage, quantization: str, progress: Progress) -> None:
    """`quantization`: gptq, awq or fp8-vllm."""
    refuse_kind(KINDS[quantization])
    dtype, is_calibrated = dtype_name(source), quantization in _CALIBRATED
    job: dict[str, Any] = {"kind": quantization, "dtype": _DTYPES[dtype]}
    job["tokenizer"] = str(source.weights.tokenizer_folder.resolve())
    if is_calibrated:
        job["group_size"] = group_size(source.weights, quantization)
    write_tokenizer(source, stage)
    folder = plain_folder(source, stage, progress)

    def quantize(out: Path) -> None:
        rows = calibration_rows(source, quantizing_device(), stage.path, progress.say) if is_calibrated else []
        log = stage.path / "llm-compressor.log"
        progress.say(f"quantizing to {quantization} with llm-compressor; its log: {log}")
        run_child({**job, "model": str(folder.resolve()), "out": str(out), "rows": rows}, log)
        found = read_json_object(out / "config.json").get("quantization_config")
        if not isinstance(found, dict):
            raise RunFailed(f"llm-compressor wrote no quantization_config; its log: {log}")
        hf.write_configs(source, _Configs(out, found), dtype)  # type: ignore[arg-type]

    stage.group("weights", quantize)


class _Configs:
    """What `hf.write_configs` writes to: config.json of the source, with how its weights are quantized."""

    def __init__(self, folder: Path, quantization: dict[str, Any]) -> None:
        self._folder, self._quantization = folder, quantization

    def json(self, name: str, value: dict[str, Any]) -> None:
        if name == "config.json":
            value = {**config_for_vllm(value), "quantization_config": self._quantization}
        write_json(self._folder / name, value)


def run_child(job: dict[str, Any], log: Path) -> None:
    path = log.with_name("llm-compressor.json")
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [*ends_with_parent(), str(LLM_COMPRESSOR.python()), str(_CHILD), str(path)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean_environment(), cwd=log.parent,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # after Ctrl-C
        child.wait()
    if code:
        killed = f"it was killed by signal {-code}" if code < 0 else error_line(log)
        raise RunFailed(f"llm-compressor failed: {killed}; its log: {log}")
