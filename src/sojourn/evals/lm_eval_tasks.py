"""Tasks of lm-eval (lm-evaluation-harness), which gets the model that is open here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sojourn.errors import RunFailed, UserError
from sojourn.evals.compare import Measured
from sojourn.infer.load import LoadedModel


def check_lm_eval() -> None:
    """Before a model is loaded for it."""
    if find_spec("lm_eval") is None:
        raise UserError("--lm-eval needs lm-eval; run: pip install lm-eval")


def measure_lm_eval(loaded: LoadedModel, tasks: list[str], limit: int | None) -> list[Measured]:
    """Names of its tasks, or YAML files of tasks. Its own metrics and standard errors."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8)
    try:
        found: Any = lm_eval.simple_evaluate(
            model=model, tasks=[_task(name) for name in tasks], limit=limit, bootstrap_iters=1000
        )
    except (KeyError, ValueError, OSError, ConnectionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise RunFailed(f"--lm-eval {','.join(tasks)}: {reason}; its tasks: lm-eval ls tasks") from None
    measured = []
    for task, facts in found["results"].items():
        for key, value in facts.items():
            metric, _, rule = key.partition(",")
            if not rule or metric.endswith("_stderr") or type(value) not in (int, float, np.float64):
                continue
            spread = facts.get(f"{metric}_stderr,{rule}")
            name = metric if rule == "none" else f"{metric} ({rule})"
            spread = float(spread) if isinstance(spread, (int, float)) else float("nan")
            measured.append(Measured(task, name, "mean", np.array([value]), np.ones(1), "lm-eval", spread))
    return measured


def _task(name: str) -> Any:
    if not name.endswith((".yaml", ".yml")):
        return name
    from lm_eval.utils import load_yaml_config

    if not Path(name).is_file():
        raise UserError(f"--lm-eval: {name}: no such file")
    return load_yaml_config(yaml_path=name, mode="full")
