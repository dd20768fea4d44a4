"""Tasks of lm-eval (lm-evaluation-harness), which gets the model that is open here."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from sojourn.errors import RunFailed, UserError
from sojourn.evals.compare import Kind, Measured
from sojourn.expand_user import expand_user
from sojourn.infer.load import LoadedModel
from sojourn.model.quiet import suppress_stderr
from sojourn.storage.hub_access import offline_reason

_FILES = (".yaml", ".yml")
_SHARES = ("acc", "exact_match", "em", "f1", "contains", "pass@", "prompt_level", "inst_level", "mc1", "mc2")
_NO_DOWNLOAD = ("offline", "couldn't reach", "connect", "doesn't exist on the hub", "resolve", "couldn't find cache")


def check_lm_eval(tasks: Sequence[str]) -> None:
    """Before a model is loaded for it."""
    if find_spec("lm_eval") is None:
        raise UserError("--lm-eval needs lm-eval; run: pip install lm-eval")
    for name in tasks:
        if name.endswith(_FILES) and not expand_user(name).is_file():
            raise UserError(f"--lm-eval: {name}: no such file")


def measure_lm_eval(loaded: LoadedModel, tasks: list[str], limit: int | None) -> list[Measured]:
    """`tasks`: names of its tasks, or YAML files of tasks. Its own metrics; where a metric is the mean over documents,
    with our intervals and differences, else with its standard error."""
    import logging

    for name in ("lm_eval", "huggingface_hub", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    offline_reason(None)  # where there is no network, data sets fail at once, without retries
    with suppress_stderr(not sys.stderr.isatty()):  # its progress bars
        found = _evaluate(loaded, tasks, limit)
    measured: list[Measured] = []
    for task, facts in found["results"].items():
        samples = (found.get("samples") or {}).get(task) or []
        count = ((found.get("n-samples") or {}).get(task) or {}).get("effective")
        measured += _of_task(task, facts, samples, count or 1)
    return measured


def _evaluate(loaded: LoadedModel, tasks: list[str], limit: int | None) -> dict[str, Any]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    named = [str(expand_user(name).resolve()) if name.endswith(_FILES) else name for name in tasks]
    try:
        model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8)
        found: dict[str, Any] | None = lm_eval.simple_evaluate(
            model=model, tasks=list(named), limit=limit, bootstrap_iters=1000
        )
    except Exception as error:  # its tasks are other people's code, which raises anything
        raise RunFailed(f"--lm-eval {','.join(tasks)}: {_reason(error)}") from None
    return found or {"results": {}}


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).strip("'\"") or type(error).__name__
    if isinstance(error, KeyError) and "not a registered" in text:
        return "no such task; its tasks: lm-eval ls tasks, or name a YAML file"
    if isinstance(error, ConnectionError) or any(hint in text.lower() for hint in _NO_DOWNLOAD):
        return (
            f"its data set cannot be downloaded here ({text[:160]}); download it where there is a network, or take a "
            "task whose YAML file names local data"
        )
    return text[:200]


def _of_task(task: str, facts: dict[str, Any], samples: list[dict[str, Any]], count: int) -> Iterator[Measured]:
    for key, value in facts.items():
        metric, _, rule = key.partition(",")
        if not rule or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        name = metric if rule == "none" else f"{metric} ({rule})"
        kind: Kind = "mean" if metric.startswith(_SHARES) else "number"
        rows = [one for one in samples if one.get("filter") == rule and isinstance(one.get(metric), (int, float))]
        scores = np.array([float(one[metric]) for one in rows])
        if len(scores) and math.isclose(float(scores.mean()), value, rel_tol=1e-6, abs_tol=1e-9):
            is_share = kind == "mean" and set(scores.tolist()) <= {0.0, 1.0}
            examples = hashlib.sha256(json.dumps([one.get("doc_hash") for one in rows]).encode()).hexdigest()
            yield Measured(task, name, "share" if is_share else kind, scores, np.ones(len(scores)), examples)
            continue
        spread = facts.get(f"{metric}_stderr,{rule}")
        error = float(spread) if isinstance(spread, (int, float)) else math.nan
        yield Measured(task, name, kind, np.array([value]), np.ones(1), "lm-eval", error, count)
