"""LoRA with peft: adds an adapter to a model, loads one from a folder, writes one as peft's own files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.config.messages import did_you_mean, printable
from sojourn.config.schema import MethodConfig
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.machine.compute_limit import LimitReached, call_limited
from sojourn.model.adapter_check import ADAPTER_FILE, check_adapter
from sojourn.resolve.training import lora_alpha

if TYPE_CHECKING:
    from torch import Tensor, nn

EXPERTS = "experts"  # in method.targets
_MATCHING_SECONDS = 2.0


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """peft imports bitsandbytes where it is installed, which takes seconds; a base without quantized layers needs none.
    One with them has it imported already."""
    if "bitsandbytes" in sys.modules:
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        yield
    finally:
        from peft import import_utils

        del sys.modules["bitsandbytes"]
        import_utils.is_bnb_available.cache_clear()
        import_utils.is_bnb_4bit_available.cache_clear()


def with_adapter(model: nn.Module, method: MethodConfig, seed: int, empty: bool = False) -> nn.Module:
    """The frozen model with the adapter that a run trains: `method.adapter`, or a new one, in fp32. `empty`: without
    its weights."""
    model.requires_grad_(False)
    if method.adapter is not None:
        model = (empty_adapter if empty else load_adapter)(model, method.adapter, trainable=True)
    else:
        model = add_adapter(model, method, seed)
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft leaves modules_to_save in the dtype of the base
            parameter.data = parameter.data.float()
    return model


@_without_bitsandbytes()
def add_adapter(model: nn.Module, method: MethodConfig, seed: int) -> nn.Module:
    """The model with a new adapter; only the adapter is trained. Its initial weights depend on `seed` only."""
    import torch
    from peft import LoraConfig, get_peft_model

    alpha, (targets, parameters) = lora_alpha(method), check_adapter_names(model, method)
    config = LoraConfig(
        r=method.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # some loaders require an integer
        lora_dropout=method.dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        use_rslora=method.rslora,
        use_dora=method.dora,
        modules_to_save=list(method.modules_to_save) or None,
        task_type="CAUSAL_LM",
    )
    if "all-linear" in method.targets and expert_parameters(model):
        print(_unadapted_note(model, targets, bool(parameters)), flush=True)
    torch.manual_seed(seed)
    try:
        with _experts_for_peft(model):
            return get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise UserError(f"method: no adapter fits this model: {' '.join(str(error).split())[:200]}") from None


@contextmanager
def _experts_for_peft(model: nn.Module) -> Iterator[None]:
    """Within it, peft can add an adapter to experts; afterwards they compute by our kernels."""
    from sojourn.model.experts import apply_expert_forwards, unpacked_shapes

    with unpacked_shapes(model):
        yield
    apply_expert_forwards(model)


def check_adapter_names(model: nn.Module, method: MethodConfig) -> tuple[list[str], list[str]]:
    """The layers and the parameters (of experts) that get an adapter. peft ignores names that the model does not have;
    here they are errors."""
    linear = _target_names(model.get_decoder(), linear=True)
    if not linear:
        raise UserError("method.kind: this model has no linear layers for an adapter")
    _check_tied(model, method.targets)
    _check_names(method.modules_to_save, _module_names(model), "modules_to_save")
    experts = expert_parameters(model)
    named = [name for name in method.targets if name != EXPERTS]
    parameters = experts if EXPERTS in method.targets else []
    _check_expert_targets(method, experts)
    taken = _taken_for_experts(model, linear) if experts else []
    if named == ["all-linear"]:
        return [name for name in linear if name not in taken], parameters
    _check_names(named, _target_names(model, linear=False), "targets")
    if clash := [name for name in named if name in taken]:
        raise UserError(f"method.targets: peft takes {clash[0]} for this model's experts; use {EXPERTS} instead")
    return named, parameters


def expert_parameters(model: nn.Module) -> list[str]:
    """The parameters that hold a model's experts, as peft's `target_parameters` names them; none without experts."""
    from sojourn.model.experts import WEIGHTS, expert_modules

    ends = dict.fromkeys(name.rpartition(".")[2] for name, _ in expert_modules(model))
    return [f"{end}.{weight}" for end in ends for weight in WEIGHTS]


def _check_expert_targets(method: MethodConfig, experts: list[str]) -> None:
    if EXPERTS not in method.targets:
        return
    if not experts:
        raise UserError(f"method.targets: {EXPERTS} are for mixture-of-experts models, and this is none; remove it")
    for key, none in (("dropout", "0"), ("dora", "false")):
        if getattr(method, key):
            raise UserError(f"method.{key}: peft has no {key} for adapters on experts; set method.{key}={none}")


def _taken_for_experts(model: nn.Module, names: list[str]) -> list[str]:
    """The linear layers whose names peft takes for experts, as they were called in transformers 4."""
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older version does not
        return []
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model, None)
    return [name for name in names if name not in (config.target_modules or ())]


def _unadapted_note(model: nn.Module, targets: list[str], with_experts: bool) -> str:
    others = [name for name in _target_names(model.get_decoder(), linear=True) if name not in targets]
    left = [*([] if with_experts else ["experts"]), "router", *others]
    hint = "" if with_experts else f"; method.targets=all-linear,{EXPERTS} adapts experts, too"
    return f"note: method.targets: all-linear adapts {', '.join(targets)}; not {', '.join(left)}{hint}"


def refuse_missing_adapter(folder: str | Path) -> Path:
    path = expand_user(folder)
    if not (path / ADAPTER_FILE).is_file():
        raise UserError(f"method.adapter: {folder}: no adapter there (no {ADAPTER_FILE})")
    return path


@_without_bitsandbytes()
def load_adapter(model: nn.Module, folder: str | Path, trainable: bool) -> nn.Module:
    """The model with the adapter in `folder`, as peft writes it."""
    from peft import PeftModel

    path = refuse_missing_adapter(folder)
    _check_foreign(model, path)
    try:
        with _experts_for_peft(model):
            return PeftModel.from_pretrained(model, str(path), is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"method.adapter: {folder} does not fit model.base: {why}") from None


def _check_foreign(model: nn.Module, path: Path) -> None:
    """Before peft sees it. A pattern of layers is tried on the model's names first: it may take years."""
    config = check_adapter(path)
    for key in ("target_modules", "exclude_modules"):
        pattern = config.get(key)
        if isinstance(pattern, str):
            names = [name for name, _ in model.named_modules()]
            try:
                call_limited(_MATCHING_SECONDS, None, lambda p, n: [re.fullmatch(p, one) for one in n], pattern, names)
            except (re.error, LimitReached) as error:
                raise UserError(
                    f"{path / ADAPTER_FILE}: the pattern in {key}: {error}; write the layers' names"
                ) from None


@_without_bitsandbytes()
def empty_adapter(model: nn.Module, folder: str | Path, trainable: bool) -> nn.Module:
    """The same without loading the adapter's weights."""
    from peft import PeftConfig, get_peft_model

    _check_foreign(model, expand_user(folder))
    config = PeftConfig.from_pretrained(str(expand_user(folder)))
    config.inference_mode = not trainable
    with _experts_for_peft(model):
        return get_peft_model(model, config)


def disable_adapter_upcast(model: nn.Module) -> None:
    """Autocast casts the adapter's weights to half precision, instead of peft casting its input to fp32: the same
    result, with half the memory saved for the backward."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def write_adapter(model: nn.Module, weights: dict[str, Tensor], folder: Path, base: str, revision: str | None) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`; a local base is named by its absolute path."""
    config = model.peft_config["default"]
    path = expand_user(base)
    config.base_model_name_or_path = str(path.resolve()) if path.exists() else base
    config.revision = revision
    if not isinstance(config.target_modules, str):  # a pattern
        config.target_modules = sorted(config.target_modules)
    if getattr(config, "target_parameters", None):
        config.target_parameters = sorted(config.target_parameters)
    model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=weights)
    (folder / "README.md").unlink(missing_ok=True)


def _check_names(names: list[str], allowed: list[str], key: str) -> None:
    for name in names:
        if name not in allowed:
            some = ", ".join(name for name in allowed if "proj" in name or "embed" in name or "head" in name)
            raise UserError(
                f"method.{key}: this model has no “{printable(name)}”{did_you_mean(name, allowed)}; allowed: {some}"
                + (", or all-linear" if key == "targets" else "")
            )


def _check_tied(model: nn.Module, targets: list[str]) -> None:
    """An adapter on one of two tied layers would change both once it is merged."""
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ends = [name for name in targets if "embed" in name or "lm_head" in name or name == "wte"]
    if tied and ends:
        raise UserError(
            f"method.targets: {ends[0]} is tied to the model's other embedding, so it cannot have an adapter; "
            f"use method.modules_to_save=[{ends[0]}]"
        )


def _target_names(model: nn.Module, linear: bool) -> list[str]:
    """Last parts of the names of modules that an adapter can target, each once; `linear`: no embeddings, no LM head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D) if linear else (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    names = dict.fromkeys(name.rpartition(".")[2] for name in found)
    return [name for name in names if not (linear and name == "lm_head")]


def _module_names(model: nn.Module) -> list[str]:
    return list(dict.fromkeys(n.rpartition(".")[2] for n, _ in model.named_modules() if n and not n[-1].isdigit()))
