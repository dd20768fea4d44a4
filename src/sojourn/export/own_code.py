"""The Python code that a model brings (`auto_map` in config.json). It is run, and copied beside the weights, only where
the model's run has `model.trust_remote_code=true`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.storage.files import read_json_object

_CONFIG, _MODEL = "AutoConfig", "AutoModelForCausalLM"


def is_known(config: dict[str, Any]) -> bool:
    """Whether transformers has a causal language model of this type itself."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(config.get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def needs_code(folder: Path) -> bool:
    """Whether only the code that a model's folder names can open it."""
    config = read_json_object(folder / "config.json")
    return bool(named_classes(config)) and not is_known(config)


@dataclass(frozen=True)
class OwnCode:
    """`named`: the classes, as config.json's `auto_map` has them. `folder`: that of the .py files."""

    named: dict[str, str]
    folder: Path

    @cached_property
    def classes(self) -> dict[str, Any]:
        """Of the model, and of its config where that is not transformers' own. This runs the code."""
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

        try:
            found = {name: get_class_from_dynamic_module(one, str(self.folder)) for name, one in self.named.items()}
        except OSError:
            raise UserError(
                f"{self.folder}: the .py files that its config.json names are not there; copy them into it, or of a "
                "model on the hub: sojourn pull NAME --include '*.py'"
            ) from None
        except ImportError as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(f"{self.folder}: its Python code does not run here: {why}") from None
        found[_MODEL].register_for_auto_class(_MODEL)  # as AutoModelForCausalLM.from_pretrained does
        return {**found, _MODEL: add_generation_mixin_to_remote_model(found[_MODEL])}

    @property
    def model_class(self) -> Any:
        return self.classes[_MODEL]

    def config(self, values: dict[str, Any]) -> Any:
        """transformers' config."""
        from transformers import AutoConfig

        own = self.classes.get(_CONFIG)
        return own.from_dict(dict(values)) if own is not None else AutoConfig.for_model(**values)

    @property
    def auto_map(self) -> dict[str, str]:
        """For a folder that has the files of `write`."""
        return {name: f"{one.__module__.rpartition('.')[2]}.{one.__name__}" for name, one in self.classes.items()}

    def write(self, folder: Path) -> None:
        """The files of these classes, with what they import from their folder, as `save_pretrained` writes them."""
        from transformers.dynamic_module_utils import custom_object_save

        for one in self.classes.values():
            custom_object_save(one, folder)


def named_classes(config: dict[str, Any]) -> dict[str, str]:
    """Empty where the model's class is transformers' own."""
    named = config.get("auto_map")
    found = {name: named.get(name) for name in (_CONFIG, _MODEL)} if isinstance(named, dict) else {}
    classes = {name: one for name, one in found.items() if isinstance(one, str)}
    return classes if _MODEL in classes else {}
