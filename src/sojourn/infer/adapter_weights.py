"""The tensors of a LoRA adapter on disk, by the weight of the base that each changes: a folder as peft writes it, or
the trained tensors of a checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.config.messages import printable
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.infer.weight_source import check_finite, file_stamp
from sojourn.model.adapter_check import ADAPTER_FILE, ADAPTER_WEIGHTS, check_adapter
from sojourn.model.safetensors_reader import SafetensorsFile

if TYPE_CHECKING:
    from torch import Tensor

_LORA = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?:\.default)?(?P<leaf>\.weight|\.bias)?"
)
WITH_PEFT = "merge it with peft's merge_and_unload(), then export that folder"
# Settings of peft that change the forward, or the base, in ways that are not merged here
_UNSUPPORTED = (
    "layer_replication", "megatron_config", "trainable_token_indices", "alora_invocation_tokens", "target_parameters",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass
class _Lora:
    """Keys in the file. `transposed`: A and B are of an embedding, or of a layer whose weight is (in, out)."""

    a: str = ""
    b: str = ""
    magnitude: str | None = None
    bias: str | None = None
    transposed: bool = False


@dataclass
class AdapterWeights:
    """`path`: for messages. `config`: adapter_config.json. `weight`: how much of it is merged."""

    path: Path
    config: dict[str, Any]
    file: SafetensorsFile
    weight: float = 1.0
    _lora: dict[str, _Lora] = field(default_factory=dict, init=False)
    _saved: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        _check_config(self.path, self.config)
        for key in self.file.entries:
            self._add(key)
        half = next((name for name, one in self._lora.items() if not (one.a and one.b)), None)
        if half is not None or not (self._lora or self._saved):
            what = f"{half} has only one of lora_A and lora_B" if half else "no LoRA weights in it"
            raise UserError(f"{self.file.path}: not a whole adapter ({what}); copy it again")

    def _add(self, key: str) -> None:
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        found = _LORA.fullmatch(name)
        if found is None:
            plain = name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
            self._saved[plain] = key
            return
        one = self._lora.setdefault(f"{found['module']}.weight", _Lora())
        kind, leaf = found["kind"], found["leaf"]
        if leaf == ".bias":
            one.bias = key
        elif kind == "lora_magnitude_vector":
            one.magnitude = key
        else:
            setattr(one, kind[-1].lower(), key)
            one.transposed = "embedding" in kind or bool(self.config.get("fan_in_fan_out"))

    @property
    def base_name(self) -> str:
        """The base that it was trained on: a path or a name on the hub."""
        return str(self.config.get("base_model_name_or_path") or "")

    def modules(self) -> list[str]:
        """The base's weights that have a LoRA."""
        return list(self._lora)

    def saved(self) -> list[str]:
        """The base's tensors that the adapter replaces: modules_to_save, and trained biases."""
        return list(self._saved)

    def load_saved(self, name: str) -> Tensor:
        return self.file.load(self._saved[name])

    def saved_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.file.rows(self._saved[name], start, stop)

    def saved_shape(self, name: str) -> tuple[int, ...]:
        return self.file.entries[self._saved[name]].shape

    def lora(self, name: str) -> tuple[Tensor, Tensor, float]:
        """A (rank, in), B (out, rank), in fp32, and the scaling: the weight changes by scaling · B @ A, transposed
        where `is_transposed` is true."""
        one = self._lora[name]
        a, b = (check_finite(self.file.load(key), key, self.path).float() for key in (one.a, one.b))
        return a, b, self.scaling(name)

    def is_transposed(self, name: str) -> bool:
        return self._lora[name].transposed

    def changed_shape(self, name: str) -> tuple[int, int]:
        """Of the weight that the LoRA of `name` fits."""
        one = self._lora[name]
        shape = self.file.entries[one.b].shape[0], self.file.entries[one.a].shape[-1]
        return shape[::-1] if one.transposed else shape

    def magnitude(self, name: str) -> Tensor | None:
        """DoRA's, one per output; None for LoRA."""
        key = self._lora[name].magnitude
        return None if key is None else self.file.load(key).float().reshape(-1)

    def has_magnitude(self, name: str) -> bool:
        return self._lora[name].magnitude is not None

    def bias(self, name: str) -> Tensor | None:
        """lora_B's own bias, which few adapters have; scaled."""
        key = self._lora[name].bias
        return None if key is None else self.file.load(key).float() * self.scaling(name)

    def biased(self) -> dict[str, str]:
        """The base's bias → the weight beside it, where lora_B has a bias."""
        return {f"{n.removesuffix('weight')}bias": n for n, one in self._lora.items() if one.bias is not None}

    def more_than_lora(self) -> str | None:
        """What it does beside adding products of A and B to matrices; None: nothing."""
        if any(one.magnitude is not None for one in self._lora.values()):
            return "is a DoRA"
        return "replaces whole tensors" if self._saved else "has biases" if self.biased() else None

    def scaling(self, name: str) -> float:
        """alpha / rank, or alpha / √rank for rsLoRA. The rank is that of the tensors."""
        rank = self.file.entries[self._lora[name].a].shape[0]
        alphas = self.config.get("alpha_pattern") or {}
        module = name.removesuffix(".weight")
        pattern = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = float(self.config.get("lora_alpha", 8) if pattern is None else alphas[pattern])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def stamp(self) -> str:
        config = self.path / ADAPTER_FILE
        return f"{file_stamp(self.file.path, *([config] if config.is_file() else []))} {self.weight}"


def open_adapter(folder: Path, weight: float = 1.0) -> AdapterWeights:
    """An adapter in peft's files."""
    return AdapterWeights(folder, check_adapter(folder), SafetensorsFile(folder / ADAPTER_WEIGHTS), weight)


def _check_types(path: Path, config: dict[str, Any]) -> None:
    """Of what is read here. A pattern may be a regular expression; one that could take forever is refused."""
    patterns, saved = config.get("alpha_pattern") or {}, config.get("modules_to_save") or []
    wrong = ""
    if not _is_number(config.get("lora_alpha", 8)):
        wrong = "lora_alpha is not a number"
    elif not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        wrong = "modules_to_save is not a list of names"
    elif not isinstance(patterns, dict) or not all(map(_is_number, patterns.values())):
        wrong = "alpha_pattern does not map names to numbers"
    elif not all(map(_is_simple_pattern, patterns)):
        wrong = "alpha_pattern has a pattern that is not a simple regular expression"
    if wrong:
        raise UserError(f"{path / ADAPTER_FILE}: {wrong}; {WITH_PEFT}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_simple_pattern(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return not re.search(r"\)[*+{]", pattern) and len(re.findall(r"[*+{]", pattern)) <= 4


def _check_config(path: Path, config: dict[str, Any]) -> None:
    kind = str(config.get("peft_type", "LORA"))
    if kind != "LORA":
        raise UserError(f"{path}: a {printable(kind)} adapter; only LoRA, rsLoRA and DoRA are merged; {WITH_PEFT}")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise UserError(f"{path}: trained with {key}, which is not merged here; {WITH_PEFT}")
    _check_types(path, config)
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise UserError(f"{path}: {start} changed the base's weights when its training began; {WITH_PEFT}")


def parse_adapters(given: list[str]) -> tuple[tuple[str, float], ...]:
    """DIR or DIR=WEIGHT."""
    found = []
    for text in given:
        name, separator, number = text.rpartition("=")
        if not separator or expand_user(text).exists():
            found.append((text, 1.0))
            continue
        try:
            weight = float(number)
        except ValueError:
            raise UserError(f"{text}: the weight of an adapter is a number, such as {name}=0.5") from None
        if not -100 <= weight <= 100:
            raise UserError(f"{text}: the weight of an adapter is a number between -100 and 100")
        found.append((name, weight))
    return tuple(found)
