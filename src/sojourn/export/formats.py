"""The formats that a model can be exported to: one record each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from sojourn.config.messages import did_you_mean, printable
from sojourn.errors import UserError

_K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")


@dataclass(frozen=True)
class Format:
    """`quantizations`: the first is the default. `write`: “module:function”, called as
    write(source, stage, quantization, progress). `runtimes`: what replays it, in order of preference; names in
    `infer/runtimes/registry.py`. `preflight`: “module:function”, called as preflight(source, progress) before anything
    is computed; it raises `UserError` for what the format or its program does not take. `measure`: called as
    measure(source, stage, quantization, progress) after the replay; what it returns is in the manifest and the card.
    `replayed_with`: called as replayed_with(source, stage, progress), a context in which the stage also has what the
    export needs beside it to be replayed."""

    name: str
    quantizations: tuple[str, ...]
    write: str
    runtimes: tuple[str, ...]
    preflight: str = ""
    measure: str = ""
    replayed_with: str = ""

    def check(self, source: Any, progress: Any) -> None:
        if self.preflight:
            self._function(self.preflight)(source, progress)

    def writer(self) -> Callable[..., None]:
        return self._function(self.write)

    def measurer(self) -> Callable[..., dict[str, Any]] | None:
        return self._function(self.measure) if self.measure else None

    def ready_for_replay(self, source: Any, stage: Any, progress: Any) -> AbstractContextManager[None]:
        if not self.replayed_with:
            return nullcontext()
        context: AbstractContextManager[None] = self._function(self.replayed_with)(source, stage, progress)
        return context

    def _function(self, name: str) -> Callable[..., Any]:
        module, _, function = name.partition(":")
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("sojourn."):
                raise UserError(
                    f"--to {self.name} needs the package {error.name}; run: pip install 'sojourn[export]'"
                ) from None
            raise UserError(f"--to {self.name}: not part of this version of Sojourn") from None
        return found

    def check_quantization(self, name: str | None) -> str:
        """As it is written here: Q4_K_M is q4_k_m."""
        if name is None:
            return self.quantizations[0]
        if name.lower() not in self.quantizations:
            guess = did_you_mean(name.lower(), list(self.quantizations))
            raise UserError(
                f"--quantize: {self.name} has no “{printable(name)}”{guess}; allowed: {', '.join(self.quantizations)}"
            )
        return name.lower()


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("hf", ("auto", "bf16", "fp16", "fp32"), "sojourn.export.hf:write", ("transformers", "streamed")),
        Format(
            "gguf",
            ("f16", "bf16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *_K_QUANTS),
            "sojourn.export.gguf.write:write",
            ("llamacpp", "gguf"),
        ),
        Format(
            "gguf-adapter",
            ("f16", "f32"),
            "sojourn.export.gguf.adapter:write",
            ("llamacpp", "gguf"),
            replayed_with="sojourn.export.gguf.adapter:beside_base",
        ),
        Format("onnx", ("fp32", "fp16", "int8", "int4"), "sojourn.export.onnx.write:write", ("onnxruntime",)),
        Format("mlx", ("auto", "fp16", "bf16", "q8", "q4"), "sojourn.export.mlx.write:write", ("mlx",)),
        Format(
            "vllm",
            ("auto", "bf16", "fp16"),
            "sojourn.export.vllm_folder:write",
            ("vllm", "transformers"),
            "sojourn.export.vllm_folder:check",
        ),
        Format(
            "vllm-adapter",
            ("auto",),
            "sojourn.export.vllm_folder:write_adapter",
            ("vllm", "transformers"),
            "sojourn.export.vllm_folder:check_adapter",
        ),
        Format(
            "quantized",
            ("int8", "int8-dynamic", "fp8", "int4", "nf4"),
            "sojourn.export.quantize.write:write",
            ("transformers",),
            measure="sojourn.export.quantize.measure:measure",
        ),
        Format(
            "compressed-tensors",
            ("gptq", "awq", "fp8-vllm"),
            "sojourn.export.quantize.llm_compressor:write",
            ("vllm", "transformers"),
            "sojourn.export.quantize.llm_compressor:check",
            "sojourn.export.quantize.measure:measure",
        ),
    )
}


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(
            f"--to: no format is called “{printable(name)}”{did_you_mean(name, list(FORMATS))}; "
            f"there are: {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def default_name(model: str, format: Format, quantization: str) -> str:
    """Of the folder that an export goes to: small-gguf-q4_0."""
    if format.measure:  # small-int8
        return f"{model}-{quantization}"
    suffix = "" if quantization == format.quantizations[0] else f"-{quantization}"
    return f"{model}-{format.name}{suffix}"


def describe_formats() -> dict[str, Any]:
    return {one.name: list(one.quantizations) for one in FORMATS.values()}
