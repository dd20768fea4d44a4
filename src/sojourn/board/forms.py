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

from sojourn.board.schemas import Form
from sojourn.config.load import Loaded, load_run
from sojourn.config.yaml_file import write_yaml
from sojourn.errors import UserError
from sojourn.expand_user import expand_user

_EXAMPLES = 6


def words_of(form: Form) -> list[str]:
    """RUN and KEY=VALUE, as after `sojourn train`."""
    words = [form.preset] if form.preset else []
    return words + [f"{key}={_text(value)}" for key, value in _given(form).items()]


def _given(form: Form) -> dict[str, Any]:
    """Without the fields that were left empty."""
    return {key: value for key, value in form.settings.items() if value not in (None, "", [])}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(form: Form) -> dict[str, Any]:
    """The line to type, a YAML file that means the same, and what is wrong with it, if anything."""
    words = words_of(form)
    answer: dict[str, Any] = {
        "words": words, "line": shlex.join(["sojourn", "train", *words]),
        "launch_line": shlex.join(["sojourn", "launch", *words, "--on", form.host or "HOST"]),
        "yaml": "", "errors": [], "notes": [],
    }  # fmt: skip
    try:
        loaded = load_run(words)
    except UserError as error:
        return {**answer, "errors": [str(error)]}
    return {**answer, "notes": list(loaded.notes), "yaml": _yaml(form), "name": loaded.config.name}


def _yaml(form: Form) -> str:
    values: dict[str, Any] = {"extends": form.preset} if form.preset else {}
    for key, value in _given(form).items():
        place = values
        *sections, last = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return write_yaml(values)


def plan(form: Form) -> dict[str, Any]:
    """What `sojourn plan --json` prints, and the line for it."""
    from sojourn.catalog.gpus import find_gpu
    from sojourn.plan.advice import advise_for, faster
    from sojourn.plan.arguments import known_platform, to_budget, to_seconds
    from sojourn.plan.as_json import plan_values
    from sojourn.plan.offers import make_plan

    words = words_of(form)
    loaded: Loaded = load_run(words)
    config = loaded.config
    cards = list(dict.fromkeys(map(find_gpu, form.gpu))) if form.gpu else None
    given = {"platform": form.platform, "budget": form.budget, "deadline": form.deadline}
    options = {name: value for name, value in given.items() if value}
    money = to_budget(options["budget"]) if "budget" in options else config.limits.budget
    seconds = to_seconds(options["deadline"]) if "deadline" in options else config.limits.time
    place = known_platform(options.get("platform"))
    found = make_plan(config, cards, place, money, seconds)
    _, advice = advise_for(config, found, cards, place)
    typed = [word for name in form.gpu for word in ("--gpu", name)]
    typed += [word for name, value in options.items() for word in (f"--{name}", value)]
    line = shlex.join(["sojourn", "plan", *words, *typed])
    values = plan_values(config, found, advice, faster(config, found))
    return {**values, "line": line, "notes": list(loaded.notes)}


def preview(form: Form, roots: list[Path]) -> dict[str, Any]:
    """The recognised formats, and the first examples decoded from their tokens and mask. Only files below `roots` are
    shown."""
    try:
        from sojourn.data.encode import Encoder
        from sojourn.data.examples import make_examples
        from sojourn.data.inputs import open_inputs
        from sojourn.data.preview import make_preview
        from sojourn.data.settings import data_settings
        from sojourn.data.write import encoder_config
    except ImportError as error:
        raise UserError(f"looking at data needs {error.name}; type: pip install 'sojourn[train]'") from None
    config = load_run(words_of(form)).config
    for source in (*config.data.sources, *config.data.eval_sources):
        _check_place(source.path, roots)
    notes: list[str] = []
    inputs = open_inputs(data_settings(config), notes.append, config.advanced.split_digits)
    found = make_preview(inputs)
    if inputs.tokenizer is None:
        examples = [{"where": one.where, "text": _plain_text(one), "spans": None} for one in found.documents]
        notes.append("a tokenizer will be trained on this data; the mask is shown once it is prepared")
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = inputs.tokenizer.fast_file_in(Path(folder))
            encoder = Encoder(encoder_config(inputs, inputs.tokenizer, found, file))
            made = make_examples(encoder, inputs.tokenizer.tokenizer, found.documents)
            examples = [asdict(one) for one in islice(made, _EXAMPLES)]
    return {"formats": found.formats, "examples": examples[:_EXAMPLES], "pairs": found.pairs, "notes": notes}


def _check_place(path: str, roots: list[Path]) -> None:
    """Of a file or folder; names of data sets are no paths here."""
    place = expand_user(path)
    is_file = place.is_absolute() or ".." in place.parts or place.exists()
    if is_file and not any(place.resolve().is_relative_to(root.resolve()) for root in roots):
        raise UserError(f"{path}: outside the folders of this board; upload it, or start: sojourn board {place.parent}")


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
