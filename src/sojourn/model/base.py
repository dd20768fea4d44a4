"""Opens an existing causal language model: a folder, a GGUF file, or a name on the hub at a pinned revision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.model.quiet import no_bars, quiet_transformers
from sojourn.storage.hub_access import not_cached_error, offline_reason


@dataclass(frozen=True)
class Base:
    """Which model, and how it is to be held: `bits` is 4 or 8 for a quantised one.

    `cut`: FSDP will cut its weights, which older torch only does to tensors of floating point numbers. The bits of a
    quantised one are kept as such then.
    """

    word: str
    revision: str | None = None
    trust_remote_code: bool = False
    bits: int | None = None
    double_quant: bool = True
    cut: bool = False

    @property
    def place(self) -> dict[str, Any]:
        """What transformers' `from_pretrained` is told of where it is."""
        path = Path(self.word).expanduser()
        common = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        if path.suffix == ".gguf" and path.is_file():
            return {**common, "pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        if path.is_dir():
            return {**common, "pretrained_model_name_or_path": str(path)}
        return {**common, "pretrained_model_name_or_path": self.word}


def load_base_model(base: Base, dtype: Any, device: str) -> Any:
    """The model on its device, in `dtype` (its weights in 4 or 8 bits where asked)."""
    import transformers
    from safetensors import SafetensorError

    quiet_transformers()
    _check_place(base)
    extra: dict[str, Any] = {}
    packed = "gguf_file" in base.place
    if base.bits is not None:
        extra["quantization_config"] = _quantisation(base, dtype)
    elif packed and hasattr(transformers, "GgufConfig"):  # newer ones might leave it packed
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if base.bits is not None or device == "cuda":
        extra["device_map"] = {"": device}
    try:
        with no_bars(packed):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                **base.place, dtype=dtype, output_loading_info=True, **extra
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise _told(base, error) from None
    lacking = [*found["missing_keys"], *(str(one[0]) for one in found["mismatched_keys"])]
    if lacking:  # transformers would make them up
        raise UserError(
            f"model.base: {base.word} lacks {len(lacking)} of the weights of a {type(model).__name__}, such as "
            f"{sorted(lacking)[0]}; is it whole, and a model that writes text?"
        )
    if packed:
        _forget_packing(model)
    return model if "device_map" in extra else model.to(device)


def empty_base_model(base: Base, dtype: Any) -> Any:
    """The same model with room for its weights, which takes no memory until they come."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            load_model_config(base), dtype=dtype, trust_remote_code=base.trust_remote_code
        )
    model = model.to_empty(device="cpu")
    model.tie_weights()
    return model


def _forget_packing(model: Any) -> None:
    """It is a model like any other now; transformers would still refuse to save it."""
    model.hf_quantizer = model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def load_model_config(base: Base) -> Any:
    """The model's configuration alone."""
    from transformers import AutoConfig

    quiet_transformers()
    _check_place(base)
    try:
        return AutoConfig.from_pretrained(**base.place)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _told(base, error) from None


def _check_place(base: Base) -> None:
    path = Path(base.word).expanduser()
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"model.base: {base.word} is an adapter; set model.base to the model that it was made for, and "
            f"method.adapter={base.word} to train it further"
        )
    looks_local = base.word.startswith((".", "/", "~")) or base.word.count("/") > 1 or path.suffix == ".gguf"
    if looks_local and not path.exists():
        raise UserError(f"model.base: {base.word}: no such folder or file")
    if not path.exists():
        offline_reason(None)  # where there is no way to the hub, it is asked once and not five times
    if path.is_dir() and not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; name the file: model.base={ggufs[0]}" if ggufs else ""
        raise UserError(f"model.base: {base.word}: no model there (no config.json){hint}")
    if path.suffix == ".gguf":
        from importlib.util import find_spec

        if find_spec("gguf") is None:
            raise UserError("model.base: a GGUF file needs the package gguf; run: pip install gguf")
        if base.bits is not None:
            raise UserError("method.kind: qlora quantises by itself, which a GGUF file has already had; use lora")


def _quantisation(base: Base, dtype: Any) -> Any:
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise UserError("method.kind: qlora needs the package bitsandbytes; run: pip install bitsandbytes")
    if base.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=base.double_quant,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype if base.cut else None,
    )


def _told(base: Base, error: Exception) -> UserError | RunFailed:
    """Of transformers' long messages, the part that a person can act on."""
    text = " ".join(str(error).split())
    offline = "" if Path(base.word).expanduser().exists() else offline_reason(None)
    if offline:
        return not_cached_error(f"model.base: {base.word}", offline)
    if "trust_remote_code" in text:
        return UserError(
            f"model.base: {base.word} runs its own Python code; read it first, then allow it with "
            "model.trust_remote_code=true"
        )
    if "gated repo" in text or "401" in text or "403" in text:
        return UserError(
            f"model.base: {base.word} asks for permission on the hub; accept its terms there and set HF_TOKEN"
        )
    if "connect" in text:
        return RunFailed(
            f"model.base: {base.word}: the connection to the hub broke; try again, what has arrived is kept"
        )
    return UserError(f"model.base: {base.word}: {text[:300]}")
