"""The tensors of a model that training changes, by name, each once (a tied LM head is its embedding); their dtype and
the stop tokens where they leave training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.storage.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn


def trainable_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, or, of a model with frozen weights, the parameters that are not frozen (an adapter)."""
    if any(not p.requires_grad for p in model.parameters()):
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    unique = {name for name, _ in model.named_parameters()}  # lists a tied tensor once
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def all_finite(tensors: Iterable[Tensor]) -> bool:
    import torch

    amax = [
        torch.linalg.vector_norm(tensor.detach(), torch.inf, dtype=torch.float32)
        for tensor in tensors
        if tensor.is_floating_point() and tensor.numel()
    ]
    return not amax or bool(torch.isfinite(torch.stack(amax)).all())


def is_finite(tensor: Tensor) -> bool:
    """Of one tensor: its sum is, at the speed of memory; one of huge values is looked at value by value."""
    import torch

    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or not tensor.numel():
        return True
    tensor = tensor.detach()
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def load_trainable_state_dict(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Names and shapes must match exactly."""
    import torch

    current = trainable_state_dict(model)
    check_state_dict(current, tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            current[name].copy_(tensor)


def check_state_dict(current: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    wrong = sorted(current.keys() ^ loaded.keys())
    wrong = wrong or [name for name, tensor in loaded.items() if current[name].shape != tensor.shape]
    if wrong:
        raise UserError(
            f"the checkpoint belongs to another model ({wrong[0]} differs); give this run another name: name=NEW"
        )


def torch_dtype(precision: str) -> dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def stored_stop_tokens(folder: Path) -> list[int]:
    """Those of a folder's generation_config.json; none where it has none."""
    found = read_json_object(folder / "generation_config.json").get("eos_token_id")
    return [one for one in (found if isinstance(found, list) else [found]) if type(one) is int and one >= 0]


def add_stop_tokens(model: Any, stop_ids: list[int]) -> Any:
    """The model's generation settings, which stop at these tokens too."""
    settings = model.generation_config
    known = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    settings.eos_token_id = list(dict.fromkeys([*stop_ids, *(i for i in known if i is not None)]))
    return settings
