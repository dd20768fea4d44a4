"""Where a model comes from: its base, data, settings, figures, cost. For the manifest and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sojourn.config.load import read_config
from sojourn.expand_user import expand_user
from sojourn.infer.adapter_weights import AdapterWeights
from sojourn.run.folder import RunFolder
from sojourn.run.identity import MODEL_MARK, read_identity
from sojourn.run.ledger import is_amount
from sojourn.storage.files import read_json_object

_SECTIONS = ("model", "method", "train", "data")


def model_name(name: str) -> str:
    """A hub name as it is, a path by its last part: cards are published, home folders are not."""
    path = expand_user(name)
    looks_local = path.is_absolute() or path.exists() or name.startswith((".", "~")) or name.count("/") > 1
    return path.resolve().name.removesuffix(".gguf") if looks_local else name


def lineage_of(path: Path, run: RunFolder | None, base: str, adapters: list[AdapterWeights]) -> dict[str, Any]:
    """`path`: the model, adapter or checkpoint. `base`: the name of the model that training or merging started from."""
    lineage: dict[str, Any] = {"base": model_name(base) if base else None}
    if adapters:
        lineage["adapters"] = [{"name": _adapter_name(one), "weight": one.weight} for one in adapters]
    return lineage if run is None else {**lineage, **_of_run(path, run)}


def _adapter_name(adapter: AdapterWeights) -> str:
    folder = adapter.path.resolve()
    is_part = folder.name in ("final", "best") or folder.name.startswith("step-")
    run = folder.parent.parent if folder.name.startswith("step-") else folder.parent
    return run.name if is_part else folder.name


def _of_run(path: Path, run: RunFolder) -> dict[str, Any]:
    environment, identity = read_json_object(run.environment), read_identity(run.identity)
    mark = read_json_object(path / MODEL_MARK) or read_json_object(path / "state.json")
    data = environment.get("data")
    found: dict[str, Any] = {
        "run": run.path.resolve().name,
        "run_id": identity.run_id if identity is not None else None,
        "step": mark.get("step"),
        "data": Path(data).name if isinstance(data, str) else None,
        "figures": _figures(run, mark.get("step")),
        "cost": _cost(run),
        "trained_on": environment.get("gpu") or environment.get("machine"),
        "versions": environment.get("versions"),
    }
    if run.config.is_file():
        found["config"] = _settings(run)
    return {key: value for key, value in found.items() if value not in (None, {}, [])}


def _settings(run: RunFolder) -> dict[str, Any]:
    """The settings that decide the model, without paths."""
    config = read_config(run.config).model_dump(mode="json", include=set(_SECTIONS))
    config["model"].pop("base", None)
    config["data"] = {key: config["data"][key] for key in ("max_length", "vocab_size") if key in config["data"]}
    return {
        section: {key: value for key, value in settings.items() if value not in (None, [], {}, "auto")}
        for section, settings in config.items()
    }


def _figures(run: RunFolder, step: Any) -> dict[str, float]:
    """Losses at the model's step, or the last ones before it."""
    figures: dict[str, float] = {}
    for line in run.read_metrics():
        if isinstance(step, int) and isinstance(line.get("step"), int) and line["step"] > step:
            continue
        name, loss = {"train": "train_loss", "eval": "eval_loss"}.get(str(line.get("kind"))), line.get("loss")
        if name is not None and isinstance(loss, (int, float)):
            figures[name] = float(loss)
    return figures


def _cost(run: RunFolder) -> dict[str, Any]:
    ledger = read_json_object(run.ledger)
    cost: dict[str, Any] = {}
    for key in ("seconds", "money", "energy_joules", "energy_seconds"):
        if is_amount(ledger.get(key)) and ledger[key]:
            cost[key] = ledger[key]
    if "money" in cost and isinstance(ledger.get("currency"), str):
        cost["currency"] = ledger["currency"]
    return cost
