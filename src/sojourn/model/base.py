"""Loads an existing causal language model: a folder, a GGUF file, or a name on the hub at a pinned revision."""

from __future__ import annotations

import contextlib
import pickle
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user
from sojourn.model.folder_check import check_model
from sojourn.model.quiet import quiet_transformers, suppress_stderr
from sojourn.model.streamed_loading import streamed_loading
from sojourn.model.weights import is_finite
from sojourn.storage.files import CannotRead, read_json_object
from sojourn.storage.gguf_cache import GgufCache
from sojourn.storage.gguf_header import check_gguf
from sojourn.storage.hub_access import not_cached_error, offline_reason
from sojourn.storage.hub_download import base_model_folder, config_file

# What transformers, torch and gguf raise for files that are not what they should be
_BAD_MODEL = (
    OSError, ValueError, LookupError, ImportError, TypeError, AttributeError, AssertionError, ArithmeticError, EOFError,
    RecursionError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
)  # fmt: skip


@dataclass(frozen=True)
class BaseModelSource:
    """Which model, and how to load it. `quant_bits`: 4 (NF4) or 8 (int8) to quantize it with bitsandbytes.

    `sharded`: FSDP will shard its weights, which older torch supports for floating-point tensors only; NF4 weights are
    then stored in such tensors.
    `quantization_config`: transformers' own, for other ways to quantize it.
    """

    name_or_path: str
    revision: str | None = None
    trust_remote_code: bool = False
    quant_bits: int | None = None
    double_quant: bool = True
    sharded: bool = False
    quantization_config: Any = None

    @property
    def gguf_file(self) -> Path | None:
        path = expand_user(self.name_or_path)
        return path if path.suffix == ".gguf" and path.is_file() else None

    @property
    def is_local(self) -> bool:
        return expand_user(self.name_or_path).exists()

    @property
    def from_pretrained_args(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained`."""
        path = expand_user(self.name_or_path)
        common = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        if self.gguf_file is not None:
            return {**common, "pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_dir():
            return {**common, "pretrained_model_name_or_path": str(path)}
        return {**common, "pretrained_model_name_or_path": self.name_or_path}


def base_of(config: RunConfig) -> BaseModelSource:
    model, method = config.model, config.method
    bits = method.bits if method.kind == "qlora" else None
    sharded = config.parallel.engine == "fsdp"
    return BaseModelSource(str(model.base), model.revision, model.trust_remote_code, bits, method.double_quant, sharded)


def load_base_model(base: BaseModelSource, dtype: Any, device: str) -> Any:
    """The model on its device, in `dtype`, or quantized."""
    quiet_transformers()
    _check_source(base)
    if base.gguf_file is not None:
        return _load_gguf(base, base.gguf_file, dtype, device)
    given: dict[str, Any] = {**base.from_pretrained_args, "use_safetensors": True}
    if not base.is_local and not base.trust_remote_code:  # checked before transformers sees it
        with _named(base):
            folder = base_model_folder(base.name_or_path, base.revision)
            check_model(folder)
        given |= {"pretrained_model_name_or_path": str(folder), "revision": None}
    if base.quantization_config is not None:
        given["quantization_config"] = base.quantization_config
    if base.quant_bits is not None:
        given["quantization_config"] = _quantization_config(base, dtype)
    stored = _quant_method(Path(given["pretrained_model_name_or_path"]))
    if stored == "mxfp4" and base.quant_bits is None:
        from transformers import Mxfp4Config

        given.setdefault("quantization_config", Mxfp4Config(dequantize=True))  # transformers' kernels have no backward
    elif stored == "mxfp4" and base.quant_bits == 4:
        from sojourn.model.mxfp4 import config_without_quantization

        given["config"] = config_without_quantization(_read_config(base, base.from_pretrained_args))
    if stored == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        given["quantization_config"] = CompressedTensorsConfig(dequantize=True)  # here, not in the first forward
        with suppress_stderr(True):  # its progress bars
            return _from_pretrained(base, given, dtype, device)
    return _from_pretrained(base, given, dtype, device)


def _quant_method(folder: Path) -> str | None:
    """How a folder's weights are quantized: compressed-tensors, which llm-compressor writes for vLLM; mxfp4; …"""
    found = read_json_object(folder / "config.json").get("quantization_config")
    return found.get("quant_method") if isinstance(found, dict) else None


def _load_gguf(base: BaseModelSource, file: Path, dtype: Any, device: str) -> Any:
    """Dequantized once and kept: that takes far longer than reading the result."""
    import transformers

    cache, name = GgufCache(file, "model.base"), str(dtype).removeprefix("torch.")
    found = cache.find(name, "float32")
    if found is not None:
        with contextlib.suppress(UserError):
            return _from_pretrained(base, {"pretrained_model_name_or_path": str(found)}, dtype, device)
        cache.drop(found)
    extra = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions might keep it quantized
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with suppress_stderr(True):
        model = _from_pretrained(base, {**base.from_pretrained_args, **extra}, dtype, device)
    _forget_quantization(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    cache.keep(name, size, model.save_pretrained)
    return model


def _from_pretrained(base: BaseModelSource, given: dict[str, Any], dtype: Any, device: str) -> Any:
    """transformers' model, complete, on its device; one-line errors."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from sojourn.model.experts import apply_expert_forwards, expert_modules, quantize_experts_on_load
    from sojourn.model.mxfp4 import load_mxfp4_experts

    loading = contextlib.ExitStack()  # a CPU computes from mapped files
    if base.quant_bits is not None or device == "cuda":
        given = {**given, "device_map": {"": device}}
        loading.enter_context(streamed_loading(device, check_finite=base.quant_bits is not None))
    if base.quant_bits == 4:
        loading.enter_context(quantize_experts_on_load(leave_out="config" in given))
    try:
        with loading:
            model, info = AutoModelForCausalLM.from_pretrained(**given, dtype=dtype, output_loading_info=True)
    except CannotRead:
        raise
    except UserError as error:
        raise type(error)(f"model.base: {base.name_or_path}: {error}") from None
    except (*_BAD_MODEL, SafetensorError) as error:
        raise _load_error(base, error) from None
    except RuntimeError as error:
        if "memory" in str(error).lower():
            raise
        raise _load_error(base, error) from None
    missing = {*info["missing_keys"], *(str(one[0]) for one in info["mismatched_keys"])}
    if "config" in given:
        missing -= load_mxfp4_experts(model, Path(given["pretrained_model_name_or_path"]), dtype, device)
    if missing:  # transformers would initialize them at random
        raise UserError(
            f"model.base: {base.name_or_path} lacks {len(missing)} of the weights of a {type(model).__name__}, such as "
            f"{sorted(missing)[0]}; is it complete, and a causal language model?"
        )
    _refuse_nan(base, model)
    _keep_nf4_layout(model)
    if base.quant_bits == 4:
        if base.sharded and expert_modules(model):
            raise UserError("parallel.engine: fsdp cannot shard experts in NF4; use ddp, or method.kind=lora")
        apply_expert_forwards(model)
    if base.quant_bits is not None:
        _note_unquantized_experts(base, model)
    return model if "device_map" in given else model.to(device)


def _note_unquantized_experts(base: BaseModelSource, model: Any) -> None:
    """bitsandbytes quantizes linear layers only, and we quantize experts of the usual form to NF4 only."""
    left = sum(p.numel() for p in model.parameters() if p.ndim == 3 and getattr(p, "quant_state", None) is None)
    if left:
        hint = "; method.bits=4 quantizes those of most models" if base.quant_bits == 8 else ""
        print(f"note: method.bits: {left:,} weights of experts stay as they are{hint}", flush=True)


def _keep_nf4_layout(model: Any) -> None:
    """In evaluation on CPUs with AVX512_BF16, bitsandbytes would repack NF4 weights in place and round their scales to
    bf16: training would go on with other weights. It fails for rows that are no multiples of a block."""
    for layer in model.modules():
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            layer.support_avx512bf16_for_cpu = False


def _refuse_nan(base: BaseModelSource, model: Any) -> None:
    import torch

    for name, weight in model.named_parameters():
        # NF4 stored in a float tensor, for FSDP: its bits are no numbers; torchao's tensors have no sum
        is_packed = hasattr(weight, "quant_state") or type(weight.data) is not torch.Tensor
        if not is_packed and not is_finite(weight):
            what = f"{name} has a NaN or an infinity in it"
            raise UserError(f"model.base: {base.name_or_path}: {what}; copy or download it again")


def empty_base_model(base: BaseModelSource, dtype: Any) -> Any:
    """The same model with uninitialized weights, which take no memory until they are written."""
    model = meta_model(base, dtype).to_empty(device="cpu")
    model.tie_weights()
    return model


def meta_model(base: BaseModelSource, dtype: Any = None) -> Any:
    """The same model without memory for its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            load_model_config(base), dtype=dtype, trust_remote_code=base.trust_remote_code
        )


def _forget_quantization(model: Any) -> None:
    """The weights are dequantized by now; transformers would still refuse to save the model."""
    model.hf_quantizer = model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def load_model_config(base: BaseModelSource) -> Any:
    """The model's transformers config."""
    quiet_transformers()
    _check_source(base, weights=False)
    if base.gguf_file is None:
        if not base.is_local and not base.trust_remote_code:
            with _named(base):
                check_model(config_file(base.name_or_path, base.revision).parent, weights=False)
        return _read_config(base, base.from_pretrained_args)
    cache = GgufCache(base.gguf_file, "model.base")
    found = cache.find("config")
    if found is not None:
        with contextlib.suppress(UserError):
            return _read_config(base, {"pretrained_model_name_or_path": str(found)})
        cache.drop(found)
    config = _read_config(base, base.from_pretrained_args)
    cache.keep("config", 0, config.save_pretrained)
    return config


def _read_config(base: BaseModelSource, given: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(**given)
    except _BAD_MODEL as error:
        raise _load_error(base, error) from None


@contextlib.contextmanager
def _named(base: BaseModelSource) -> Iterator[None]:
    """Errors about a file name the setting too."""
    try:
        yield
    except UserError as error:
        if str(error).startswith("model.base: "):
            raise
        raise type(error)(f"model.base: {error}") from None


def _check_source(base: BaseModelSource, weights: bool = True) -> None:
    path = expand_user(base.name_or_path)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"model.base: {base.name_or_path} is an adapter; set model.base to its base model, and "
            f"method.adapter={base.name_or_path} to train it further"
        )
    if (path / "adapter_config.json").exists():  # transformers would open whatever base it names
        raise UserError(
            f"model.base: {base.name_or_path} is an adapter and a model at once; move adapter_config.json and the "
            "adapter's weights to a folder of their own"
        )
    looks_local = (
        base.name_or_path.startswith((".", "/", "~")) or base.name_or_path.count("/") > 1 or path.suffix == ".gguf"
    )
    if looks_local and not path.exists():
        raise UserError(f"model.base: {base.name_or_path}: no such folder or file")
    if not path.exists():
        offline_reason(None)  # fail at once, without transformers' five retries
    if path.is_dir() and not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; name the file: model.base={ggufs[0]}" if ggufs else ""
        raise UserError(f"model.base: {base.name_or_path}: no model there (no config.json){hint}")
    with _named(base):
        if path.is_dir():
            check_model(path, weights)
        elif base.gguf_file is not None:
            check_gguf(path)
    if path.suffix == ".gguf":
        from importlib.util import find_spec

        if find_spec("gguf") is None:
            raise UserError("model.base: a GGUF file needs the package gguf; run: pip install gguf")
        if base.quant_bits is not None:
            raise UserError(
                "method.kind: qlora quantizes the base itself, but a GGUF file is quantized already; use lora"
            )


def require_bitsandbytes(setting: str) -> None:
    from importlib.util import find_spec

    if find_spec("bitsandbytes") is None:
        raise UserError(f"{setting} needs the package bitsandbytes; run: pip install bitsandbytes")


def _quantization_config(base: BaseModelSource, dtype: Any) -> Any:
    from transformers import BitsAndBytesConfig

    require_bitsandbytes("method.kind: qlora")
    if base.quant_bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=base.double_quant,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype if base.sharded else None,
    )


def _load_error(base: BaseModelSource, error: Exception) -> UserError | RunFailed:
    """A one-line error with what to do, from transformers' long one."""
    text = " ".join(str(error).split())
    offline = "" if expand_user(base.name_or_path).exists() else offline_reason(None)
    if offline:
        return not_cached_error(f"model.base: {base.name_or_path}", offline)
    if "trust_remote_code" in text:
        return UserError(
            f"model.base: {base.name_or_path} runs its own Python code; read it first, then allow it with "
            "model.trust_remote_code=true"
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return UserError(
            f"model.base: {base.name_or_path}: this version of transformers does not know its architecture; run: "
            "pip install -U transformers, or take another model"
        )
    if "gated repo" in text or "401" in text or "403" in text:
        return UserError(
            f"model.base: {base.name_or_path} is gated on the hub; accept its terms there and set HF_TOKEN"
        )
    if "connect" in text:
        return RunFailed(
            f"model.base: {base.name_or_path}: lost the connection to the hub; try again, finished files are kept"
        )
    return UserError(f"model.base: {base.name_or_path}: {text[:300] or type(error).__name__}")
