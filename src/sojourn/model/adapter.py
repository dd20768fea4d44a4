"""LoRA through peft: adapters put on a model, taken up from a folder, and written as peft's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.config.schema import MethodConfig
from sojourn.config.words import closest, shown
from sojourn.errors import UserError

ADAPTER_FILE = "adapter_config.json"


def add_adapter(model: Any, method: MethodConfig, seed: int) -> Any:
    """The model with a new adapter that alone is trained; its first weights come from `seed`."""
    import torch
    from peft import LoraConfig, get_peft_model

    linear, alpha = _linear_names(model), usual_alpha(method)
    everywhere = method.targets == ["all-linear"]
    config = LoraConfig(
        r=method.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # some readers of adapters want a whole number
        lora_dropout=method.dropout,
        target_modules=linear if everywhere else _checked(method.targets, _module_names(model), "targets"),
        use_rslora=method.rslora,
        use_dora=method.dora,
        modules_to_save=_checked(method.modules_to_save, _module_names(model), "modules_to_save") or None,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    return get_peft_model(model, config)


def usual_alpha(method: MethodConfig) -> float:
    """`auto` is twice the rank: the adapter counts double."""
    return 2.0 * method.rank if method.alpha == "auto" else method.alpha


def open_adapter(model: Any, folder: str | Path, trainable: bool) -> Any:
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


def compute_narrow(model: Any) -> None:
    """Lets autocast narrow the adapter's weights, instead of peft widening what they are multiplied with: the same
    numbers, with half the memory kept for the backward."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def write_adapter(model: Any, folder: Path, base: str, revision: str | None) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`; a local base is named by its whole path."""
    config = model.peft_config["default"]
    place = Path(base).expanduser()
    config.base_model_name_or_path = str(place.resolve()) if place.exists() else base
    config.revision = revision
    config.target_modules = sorted(config.target_modules)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def _checked(wanted: list[str], there: list[str], key: str) -> list[str]:
    """peft passes over a name that it does not find; a person would rather know."""
    for name in wanted:
        if name not in there:
            some = ", ".join(name for name in there if "proj" in name or "embed" in name or "head" in name)
            raise UserError(
                f"method.{key}: this model has no “{shown(name)}”{closest(name, there)}; allowed: {some}"
                + (", or all-linear" if key == "targets" else "")
            )
    return list(wanted)


def _linear_names(model: Any) -> list[str]:
    """The last parts of the names of all linear layers but the head, each once."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    found = [n for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in found))


def _module_names(model: Any) -> list[str]:
    return list(dict.fromkeys(n.rpartition(".")[2] for n, _ in model.named_modules() if n and not n[-1].isdigit()))
