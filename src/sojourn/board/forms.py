"""The form of a new run: from its fields to the words of a command, a YAML file, a plan, and a look at the data.

A form is a preset and settings by their dotted keys. Everything here is what the command line does with the same words.
"""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from sojourn.config.load import Loaded, load_run
from sojourn.config.yaml_file import write_yaml
from sojourn.errors import UserError

_MOST_SETTINGS = 200
_EXAMPLES = 6


def words_of(form: dict[str, Any]) -> list[str]:
    """RUN and KEY=VALUE, as after `sojourn train`."""
    preset, settings = form.get("preset"), form.get("settings") or {}
    if preset is not None and not isinstance(preset, str):
        raise UserError("preset: a name is needed")
    if not isinstance(settings, dict) or len(settings) > _MOST_SETTINGS:
        raise UserError("settings: keys and values are needed")
    words = [preset] if preset else []
    for key, value in settings.items():
        if value is None or value == "":
            continue
        if not isinstance(key, str) or key.startswith("-") or "=" in key:
            raise UserError(f"settings: {str(key)[:40]!r} is not a key")
        words.append(f"{key}={_text(value)}")
    return words


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        raise UserError("settings: a value is text, a number, or a list of these")
    return str(value)


def describe(form: dict[str, Any]) -> dict[str, Any]:
    """The line to type, a YAML file that means the same, and what is wrong with it, if anything."""
    words = words_of(form)
    answer: dict[str, Any] = {
        "words": words, "line": shlex.join(["sojourn", "train", *words]),
        "launch_line": shlex.join(["sojourn", "launch", *words, "--on", str(form.get("host") or "HOST")]),
        "yaml": "", "errors": [], "notes": [],
    }  # fmt: skip
    try:
        loaded = load_run(words)
    except UserError as error:
        return {**answer, "errors": [str(error)]}
    return {**answer, "notes": list(loaded.notes), "yaml": _yaml(form), "name": loaded.config.name}


def _yaml(form: dict[str, Any]) -> str:
    values: dict[str, Any] = {"extends": form["preset"]} if form.get("preset") else {}
    for key, value in (form.get("settings") or {}).items():
        if value is None or value == "":
            continue
        place = values
        *sections, last = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return write_yaml(values)


def plan(form: dict[str, Any]) -> dict[str, Any]:
    """What `sojourn plan --json` prints, and the line for it."""
    from sojourn.catalog.gpus import find_gpu
    from sojourn.plan.advice import advise_for, faster
    from sojourn.plan.arguments import known_platform, to_budget, to_seconds
    from sojourn.plan.as_json import plan_values
    from sojourn.plan.offers import make_plan

    words = words_of(form)
    loaded: Loaded = load_run(words)
    config = loaded.config
    names = [str(name) for name in form.get("gpu") or []]
    cards = list(dict.fromkeys(map(find_gpu, names))) if names else None
    options = {name: str(form[name]) for name in ("platform", "budget", "deadline") if form.get(name)}
    money = to_budget(options["budget"]) if "budget" in options else config.limits.budget
    seconds = to_seconds(options["deadline"]) if "deadline" in options else config.limits.time
    place = known_platform(options.get("platform"))
    found = make_plan(config, cards, place, money, seconds)
    _, advice = advise_for(config, found, cards, place)
    given = [word for name in names for word in ("--gpu", name)]
    given += [word for name, value in options.items() for word in (f"--{name}", value)]
    line = shlex.join(["sojourn", "plan", *words, *given])
    values = plan_values(config, found, advice, faster(config, found))
    return {**values, "line": line, "notes": list(loaded.notes)}


def preview(form: dict[str, Any]) -> dict[str, Any]:
    """The recognised formats, and the first examples decoded from their tokens and mask."""
    try:
        from sojourn.data.encode import Encoder
        from sojourn.data.examples import make_examples
        from sojourn.data.inputs import data_settings, open_inputs
        from sojourn.data.preview import make_preview
        from sojourn.data.write import encoder_config
    except ImportError as error:
        raise UserError(f"looking at data needs {error.name}; type: pip install 'sojourn[train]'") from None
    config = load_run(words_of(form)).config
    notes: list[str] = []
    inputs = open_inputs(data_settings(config), notes.append, config.advanced.split_digits)
    found = make_preview(inputs)
    if inputs.tokenizer is None:
        examples = [{"where": one.where, "text": _plain_text(one), "spans": None} for one in found.documents]
        notes.append("a tokenizer will be trained on this data; the mask is shown once it is prepared")
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tokenizer.json"
            inputs.tokenizer.tokenizer.save(str(file))
            encoder = Encoder(encoder_config(inputs, inputs.tokenizer, found, file))
            made = make_examples(encoder, inputs.tokenizer.tokenizer, found.documents)
            examples = [asdict(one) for one in islice(made, _EXAMPLES)]
    return {"formats": found.formats, "examples": examples[:_EXAMPLES], "pairs": found.pairs, "notes": notes}


def _plain_text(document: Any) -> str:
    if document.is_chat:
        return "\n\n".join(f"{message.role}: {message.content}" for message in document.messages)[:20_000]
    return str(document.text)[:20_000]


def catalogue() -> dict[str, Any]:
    """What the form offers."""
    from sojourn.catalog.datasets import datasets
    from sojourn.catalog.gpus import gpus
    from sojourn.catalog.models import models
    from sojourn.catalog.platforms import platforms
    from sojourn.config.preset import presets
    from sojourn.remote.hosts import load_hosts

    return {
        "presets": [{"name": one.name, "description": one.summary, "settings": _preset(one.name)} for one in presets()],
        "models": [{"name": one.name, "parameters": one.parameters} for one in models()],
        "gpus": [{"name": one.name, "memory": one.memory_gib} for one in gpus()],
        "platforms": [one.name for one in platforms()],
        "hosts": list(load_hosts()),
        "data_sets": [{"name": one.name, "description": one.description} for one in datasets()],
    }  # fmt: skip


def _preset(name: str) -> dict[str, Any]:
    """What the form's fields start from."""
    config = load_run([name]).config
    return {
        "model.base": config.model.base, "method.kind": config.method.kind, "method.rank": config.method.rank,
        "data.max_length": config.data.max_length, "train.global_batch": config.train.global_batch,
        "train.lr": config.train.lr, "train.epochs": config.train.epochs, "train.steps": config.train.steps,
        "data.sources": [source.path for source in config.data.sources],
    }  # fmt: skip
