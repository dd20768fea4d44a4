"""Settings that no device decides: sizes of a new model, learning rate, LoRA's alpha, the chat template."""

from __future__ import annotations

from sojourn.catalog.models import ModelSpec
from sojourn.config.schema import MethodConfig
from sojourn.resolve.device_spec import DeviceSpec
from sojourn.resolve.resolved import Resolved

_LORA_LR = 2e-4
_WIDE = 2048  # d_model from which on full fine-tuning takes the lower of two learning rates


def resolve_new_model(resolved: Resolved, model: ModelSpec) -> None:
    """The sizes that `auto`, or a dial (`model.params`, `model.depth`), stands for."""
    section = resolved.config.model
    dials = {key: getattr(section, key) for key in ("params", "depth")}
    given = [f"model.{key} {value}" for key, value in dials.items() if value is not None]
    for key, value in (
        ("d_model", model.hidden),
        ("num_layers", model.layers),
        ("num_heads", model.heads),
        ("num_kv_heads", model.kv_heads),
        ("ffn_size", model.ffn),
        ("tie_embeddings", model.tied),
    ):
        if getattr(section, key) == "auto":
            resolved.choose("model", key, value, f"the usual choice at width {model.hidden}")
        elif getattr(section, key) is None:
            resolved.choose("model", key, value, f"what {given[0]} comes to")
    # The sizes are written out now; a dial beside them would be refused as a second statement of the same.
    written = resolved.config.model.model_copy(update=dict.fromkeys(dials))
    resolved.config = resolved.config.model_copy(update={"model": written})
    if resolved.config.data.template == "auto":
        resolved.choose("data", "template", "chatml", "a new tokenizer has ChatML's special tokens")


def resolve_method(resolved: Resolved, model: ModelSpec) -> None:
    config = resolved.config
    uses_lora, width = config.method.kind in ("lora", "qlora"), model.hidden
    if uses_lora and config.method.alpha == "auto":
        resolved.choose("method", "alpha", lora_alpha(config.method), "twice the rank")
    if config.train.lr != "auto":
        return
    if uses_lora:
        resolved.choose("train", "lr", _LORA_LR, "usual for LoRA")
    elif config.model.base is None:
        resolved.choose("train", "lr", round(min(3e-3, 0.6 / width), 6), f"0.6 over d_model {width}, at most 3e-3")
    else:
        rate = 1e-5 if width >= _WIDE else 2e-5
        resolved.choose("train", "lr", rate, f"usual for full fine-tuning at width {width}")


def lora_alpha(method: MethodConfig) -> float:
    """`auto` is twice the rank: the adapter's output counts double."""
    return 2.0 * method.rank if method.alpha == "auto" else method.alpha


def resolve_tensorboard(resolved: Resolved, device: DeviceSpec) -> None:
    if resolved.config.log.tensorboard == "auto":
        there = "tensorboard" in device.packages
        reason = f"tensorboard is {'' if there else 'not '}installed"
        resolved.choose("log", "tensorboard", "on" if there else "off", reason)
