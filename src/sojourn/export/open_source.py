"""Opens what is to be exported: a run, a checkpoint, an adapter on its base, a model's folder, a GGUF file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.config.messages import printable
from sojourn.data.artefact import Artefact, artefact_of
from sojourn.data.tokenize.gguf_tokenizer import extract_tokenizer
from sojourn.errors import RunFailed, UserError
from sojourn.expand_user import expand_user
from sojourn.export.checkpoint_weights import CheckpointWeights, checkpoint_adapter
from sojourn.export.combine import Combine
from sojourn.export.lineage import lineage_of, model_name
from sojourn.export.merge import MergedWeights
from sojourn.export.own_code import OwnCode, is_known, named_classes
from sojourn.infer.adapter_weights import AdapterWeights, open_adapter
from sojourn.infer.find import FoundModel, find_model
from sojourn.infer.load import config_here, trusts_remote_code
from sojourn.infer.weight_source import FolderWeights, WeightSource
from sojourn.model.adapter_check import ADAPTER_FILE
from sojourn.model.weights import stored_stop_tokens
from sojourn.run.folder import RunFolder
from sojourn.run.moved_paths import path_here
from sojourn.storage.files import read_json
from sojourn.storage.gguf_cache import GgufCache
from sojourn.storage.hub_download import base_model_folder

Adapters = Sequence[tuple[str, float]]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROBES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "What is 2 + 3?"}]},
    {
        "messages": [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "再见，你好吗？"},
        ]
    },
    {"messages": [{"role": "user", "content": "  spaces, tabs\tand\n\nlines: 1,234.5 café — naïve 🙂"}]},
    {"messages": [{"role": "user", "content": "def add(a, b):\n    return a + b  # 0x1F, a_b, don't"}]},
]


@dataclass(frozen=True)
class Source:
    """`weights`: with the adapters merged into `base`. `probes`: chats (`messages`), of a run also with the `text` and
    `ids` that it was trained with. `lineage`: see `lineage.py`. `data`: what quantization calibrates and
    measures on; the run's own where None. `code`: the model's own, where it has some and the run allows it; `auto_map`
    is in no config here."""

    name: str
    weights: WeightSource
    base: WeightSource
    adapters: tuple[AdapterWeights, ...]
    lineage: dict[str, Any]
    probes: list[dict[str, Any]]
    path: Path
    run: RunFolder | None = None
    data: str | None = None
    code: OwnCode | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when the weights do."""
        return hashlib.sha256(self.weights.stamp().encode()).hexdigest()[:32]


def open_weights(
    name: str,
    checkpoint: str | None = None,
    adapters: Adapters = (),
    base: str | None = None,
    combine: Combine | None = None,
) -> Source:
    """`name` and `checkpoint`: as in `find_model`. `adapters`: folders or runs, each with its weight, merged beside the
    model's own. `base`: instead of the one that the adapter names."""
    found = find_model(name, checkpoint)
    artefact = _artefact(found.run)
    if found.is_checkpoint and artefact is None and found.run is not None:
        artefact = artefact_of(found.run)  # raises, with what to type
    model, own, base_name, tokenizer = _open_found(found, artefact, base)
    code = _take_code(model, found)
    merged = [*own, *(_open_named(one, weight) for one, weight in adapters)]
    _say_other_bases(merged, base_name)
    weights: WeightSource = MergedWeights(model, merged, combine) if merged else model
    weights.tokenizer_folder = tokenizer
    if not _has_tokenizer(tokenizer):
        raise UserError(
            f"{tokenizer}: no tokenizer there (no tokenizer.json); copy the model's tokenizer files into it"
        )
    is_adapter = (found.path / ADAPTER_FILE).is_file()
    stops = artefact.stop_ids if artefact is not None else stored_stop_tokens(found.path) if is_adapter else []
    if stops:
        weights.generation_config = _with_stop_tokens(weights, stops)
    lineage = lineage_of(found.path, found.run, base_name if merged or found.run else name, merged)
    if len(merged) > 1:
        lineage["combine"] = (combine or Combine()).describe()
    title = found.run.path.resolve().name if found.run is not None else model_name(name)
    probes = _probes(found, artefact)
    return Source(title, weights, model, tuple(merged), lineage, probes, found.path, found.run, code=code)


def _open_found(
    found: FoundModel, artefact: Artefact | None, base: str | None
) -> tuple[WeightSource, list[AdapterWeights], str, Path]:
    """The base, the adapters on it, the base's name, the folder of the tokenizer."""
    path = found.path
    if found.is_checkpoint and artefact is not None and found.run is not None:
        config = config_here(found.run)
        if config.method.kind not in ("lora", "qlora"):
            _refuse_base(base, path)
            return CheckpointWeights(path, config, artefact), [], str(config.model.base or ""), artefact.tokenizer
        base_name = base or str(config.model.base)
        model = open_base(base_name, config.model.revision, path, base is None)
        return model, [checkpoint_adapter(path, config, base_name)], base_name, artefact.tokenizer
    if (path / ADAPTER_FILE).is_file():
        adapter = open_adapter(path)
        base_name = base or path_here(adapter.base_name, path)
        model = open_base(base_name, adapter.config.get("revision"), path, base is None)
        return model, [adapter], base_name, path if _has_tokenizer(path) else model.tokenizer_folder
    _refuse_base(base, path)
    model = open_base(str(path), None, path, False)
    trained_from = str(config_here(found.run).model.base or "") if found.run is not None else str(path)
    return model, [], trained_from, model.tokenizer_folder


def _take_code(model: WeightSource, found: FoundModel) -> OwnCode | None:
    """Removes `auto_map` from the config. Without its code, a model that transformers knows is as any other."""
    named = named_classes(model.config)
    model.config.pop("auto_map", None)
    if not named:
        return None
    if found.run is None or not trusts_remote_code(found.run):
        if is_known(model.config):
            return None
        raise UserError(
            f"{found.path}: a model of type {printable(model.config.get('model_type'))} needs its own Python code, "
            "which runs only for a run with model.trust_remote_code=true; name such a run, or another model"
        )
    if isinstance(model, FolderWeights):
        return OwnCode(named, model.folder)
    base = config_here(found.run).model  # of a checkpoint
    return OwnCode(named, open_base(str(base.base), base.revision, found.path, False).folder)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def _refuse_base(base: str | None, path: Path) -> None:
    if base is not None:
        raise UserError(f"--base: {path} is a whole model, not an adapter; leave out --base")


def open_base(name: str, revision: str | None, near: Path, is_named_by_adapter: bool) -> FolderWeights:
    """A folder, a GGUF file, or a name on the hub. `near`: the adapter, for messages."""
    if not name or name == "None":
        raise UserError(f"{near}: does not say which base it was trained on; say where it is: --base DIR")
    path = expand_user(name)
    if path.suffix == ".gguf" and path.is_file():
        return FolderWeights(_unpacked(path), extract_tokenizer(path))
    if not path.is_dir():
        path = _hub_folder(name, revision, near, is_named_by_adapter)
    weights = FolderWeights(path)
    if "quantization_config" in weights.config:
        kind = printable((weights.config["quantization_config"] or {}).get("quant_method", "quantized"))
        raise UserError(
            f"{path}: its weights are quantized ({kind}), and what is merged into them loses quality; "
            f"name the 16-bit model{': --base DIR' if is_named_by_adapter or near != path else ''}"
        )
    return weights


def _unpacked(file: Path) -> Path:
    """The dequantised weights, in the cache."""
    import torch

    from sojourn.model.base import BaseModelSource, load_base_model

    cache = GgufCache(file, "the model")
    found = cache.find("float32")
    if found is None:
        load_base_model(BaseModelSource(str(file)), torch.float32, "cpu")
        found = cache.find("float32")
    if found is None:
        raise RunFailed(f"{file}: could not be unpacked into the cache; free some space there and try again")
    return found


def _hub_folder(name: str, revision: str | None, near: Path, is_named_by_adapter: bool) -> Path:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).suffix == ".gguf"
    if looks_local:
        if is_named_by_adapter:
            raise UserError(
                f"{near}: its base {name or '(no name)'} is not on this machine; say where it is: --base DIR"
            )
        raise UserError(f"{name}: no such folder or file")
    try:
        return base_model_folder(name, revision)
    except UserError as error:
        raise UserError(f"{error}, or say where it is: --base DIR") from None


def _open_named(name: str, weight: float) -> AdapterWeights:
    """An adapter by its folder, or by the name of its run."""
    found = find_model(name)
    if found.is_checkpoint and found.run is not None:
        config = config_here(found.run)
        if config.method.kind not in ("lora", "qlora"):
            raise UserError(f"--adapter: {name} trained all weights, so it has no adapter")
        adapter = checkpoint_adapter(found.path, config, str(config.model.base))
        adapter.weight = weight
        return adapter
    if not (found.path / ADAPTER_FILE).is_file():
        raise UserError(f"--adapter: {name} is a whole model, not an adapter")
    return open_adapter(found.path, weight)


def _say_other_bases(adapters: list[AdapterWeights], base: str) -> None:
    """Shapes can agree where weights do not."""
    for adapter in adapters:
        named = path_here(adapter.base_name, adapter.path)
        if named and model_name(named) != model_name(base):
            print(
                f"note: {adapter.path} was trained on {named}, and is merged into {base}", file=sys.stderr, flush=True
            )


def _artefact(run: RunFolder | None) -> Artefact | None:
    try:
        return artefact_of(run) if run is not None else None
    except UserError:
        return None


def _with_stop_tokens(weights: WeightSource, stop_ids: list[int]) -> dict[str, Any]:
    """The run's stop tokens first, as in `final/`."""
    found = weights.generation_config.get("eos_token_id", weights.config.get("eos_token_id"))
    known = found if isinstance(found, list) else [] if found is None else [found]
    return {**weights.generation_config, "eos_token_id": list(dict.fromkeys([*stop_ids, *known]))}


def _probes(found: FoundModel, artefact: Artefact | None) -> list[dict[str, Any]]:
    """The run's own, else ours."""
    stored = read_json(found.path / "probes.json") if found.path.is_dir() else None
    if stored is None and artefact is not None:
        stored = read_json(artefact.path / "probes.json")
    sound = isinstance(stored, list) and all(isinstance(one, dict) and "messages" in one for one in stored)
    return stored if sound and stored else _PROBES
