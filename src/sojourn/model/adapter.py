"""LoRA through peft: adapters put on a model, taken up from a folder, and written as peft's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.config.messages import did_you_mean, printable
from sojourn.config.schema import MethodConfig
from sojourn.errors import UserError
from sojourn.resolve.training import lora_alpha

ADAPTER_FILE = "adapter_config.json"


def add_adapter(model: Any, method: MethodConfig, seed: int) -> Any:
    """The model with a new adapter that alone is trained; its first weights come from `seed`."""
    import torch
    from peft import LoraConfig, get_peft_model

    linear, alpha = _names(model.get_decoder(), linear=True), lora_alpha(method)
    everywhere = method.targets == ["all-linear"]
    if not linear:
        raise UserError("method.kind: this model has no linear layers that an adapter could go on")
    _refuse_tied(model, method.targets)
    config = LoraConfig(
        r=method.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # some readers of adapters want a whole number
        lora_dropout=method.dropout,
        target_modules=linear if everywhere else _checked(method.targets, _names(model, linear=False), "targets"),
        use_rslora=method.rslora,
        use_dora=method.dora,
        modules_to_save=_checked(method.modules_to_save, _module_names(model), "modules_to_save") or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        return get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise UserError(f"method: no adapter fits this model: {' '.join(str(error).split())[:200]}") from None


def load_adapter(model: Any, folder: str | Path, trainable: bool) -> Any:
    """The model with the adapter that peft, or we, wrote to `folder`."""
    from peft import PeftModel

    place = Path(folder).expanduser()
    if not (place / ADAPTER_FILE).is_file():
        raise UserError(f"method.adapter: {folder}: no adapter there (no {ADAPTER_FILE})")
    try:
        return PeftModel.from_pretrained(model, str(place), is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"method.adapter: {folder} does not fit model.base: {why}") from None


def empty_adapter(model: Any, folder: str | Path, trainable: bool) -> Any:
    """The same with room for the adapter's weights."""
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(Path(folder).expanduser()))
    config.inference_mode = not trainable
    return get_peft_model(model, config)


def disable_adapter_upcast(model: Any) -> None:
    """Lets autocast narrow the adapter's weights, instead of peft widening what they are multiplied with: the same
    numbers, with half the memory kept for the backward."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def write_adapter(model: Any, weights: dict[str, Any], folder: Path, base: str, revision: str | None) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`; a local base is named by its whole path."""
    config = model.peft_config["default"]
    place = Path(base).expanduser()
    config.base_model_name_or_path = str(place.resolve()) if place.exists() else base
    config.revision = revision
    if not isinstance(config.target_modules, str):  # which is a pattern
        config.target_modules = sorted(config.target_modules)
    model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=weights)
    (folder / "README.md").unlink(missing_ok=True)


def _checked(wanted: list[str], there: list[str], key: str) -> list[str]:
    """peft passes over a name that it does not find; a person would rather know."""
    for name in wanted:
        if name not in there:
            some = ", ".join(name for name in there if "proj" in name or "embed" in name or "head" in name)
            raise UserError(
                f"method.{key}: this model has no “{printable(name)}”{did_you_mean(name, there)}; allowed: {some}"
                + (", or all-linear" if key == "targets" else "")
            )
    return list(wanted)


def _refuse_tied(model: Any, targets: list[str]) -> None:
    """An adapter on one end of shared weights would change both once merged."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ends = [name for name in targets if "embed" in name or "lm_head" in name or name == "wte"]
    if tied and ends:
        raise UserError(
            f"method.targets: {ends[0]} shares its weights with the model's other end, so it can have no adapter; "
            f"use method.modules_to_save=[{ends[0]}]"
        )


def _names(model: Any, linear: bool) -> list[str]:
    """The last parts of the names of what an adapter can go on, each once; `linear`: without embeddings and head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D) if linear else (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    names = dict.fromkeys(name.rpartition(".")[2] for name in found)
    return [name for name in names if not (linear and name == "lm_head")]


def _module_names(model: Any) -> list[str]:
    return list(dict.fromkeys(n.rpartition(".")[2] for n, _ in model.named_modules() if n and not n[-1].isdigit()))
