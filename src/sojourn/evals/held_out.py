"""Held-out loss on the rows that a run never trained on, and exact match on held-out built-in questions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sojourn.data import builtin
from sojourn.data.artefact import Artefact
from sojourn.errors import UserError
from sojourn.infer.generate import SamplingParams, format_prompt, generate
from sojourn.infer.load import LoadedModel
from sojourn.model.network import restore_attention, wrap_model
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json_object
from sojourn.train.batcher import Batcher
from sojourn.train.evaluation import evaluate_rows
from sojourn.train.objective.supervised import Supervised


@dataclass(frozen=True)
class Answer:
    task: builtin.Question
    reply: str
    is_correct: bool


def answer_held_out_questions(
    loaded: LoadedModel, per_family: int, families: tuple[str, ...] | None = None
) -> dict[str, list[Answer]]:
    """Greedy answers to built-in questions that are never trained on, by family."""
    names = families or tuple(builtin.FAMILIES)
    drawn = (builtin.instructions(per_family, seed=1, families=(name,), split="held_out") for name in names)
    tasks = [task for family in drawn for task in family]
    by_length = sorted(range(len(tasks)), key=lambda i: len(tasks[i].prompt))  # like lengths in a batch: less padding
    prompts = [format_prompt(loaded, tasks[i].prompt) for i in by_length]
    replies = dict(zip(by_length, generate(loaded, prompts, SamplingParams(max_tokens=32)), strict=True))
    answers = [Answer(task, replies[i], builtin.is_correct(task, replies[i])) for i, task in enumerate(tasks)]
    return {name: [answer for answer in answers if answer.task.family == name] for name in names}


def exact_match(answers: list[Answer]) -> float:
    """The share of correct answers."""
    return sum(answer.is_correct for answer in answers) / len(answers) if answers else math.nan


def held_out_loss(loaded: LoadedModel, run: RunFolder, rows: int) -> float:
    """Mean loss per target token on the first `rows` rows of the run's held-out split."""
    path = read_json_object(run.environment).get("data")
    if not isinstance(path, str) or not (Path(path) / "artefact.json").is_file():
        raise UserError(f"{run.path}: its prepared data is not on this machine; run: sojourn prepare {run.config}")
    artefact = Artefact(Path(path))
    if not len(artefact.eval):
        return math.nan
    has_softcap = getattr(loaded.model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    for backend in ("math" if has_softcap else "sdpa", None):  # None: the model's own attention, if ours does not fit
        network = wrap_model(loaded.model, backend)
        length, windows = artefact.row_length, network.sliding_windows
        batcher = Batcher(8, length, artefact.pad_id, loaded.device, backend=backend, windows=windows)
        try:
            return evaluate_rows(network, artefact.eval, rows, batcher, Supervised())[0]
        except NotImplementedError:
            continue
        finally:
            restore_attention(network)
    return math.nan
