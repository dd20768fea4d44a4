"""Losses on the rows that a run never trained on or on a file, and exact match on held-out built-in questions."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from sojourn.config.data import CleanConfig, Columns, DataConfig, Source
from sojourn.config.load import read_config
from sojourn.data import builtin
from sojourn.data.artefact import Artefact, artefact_of
from sojourn.data.prepare import prepare
from sojourn.data.sources.dataset_info import named_sources
from sojourn.data.sources.source import open_source
from sojourn.errors import UserError
from sojourn.evals.losses import Losses, document_losses
from sojourn.infer.generate import Generator, Prompt
from sojourn.infer.load import LoadedModel, context_length
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder

_MAX_LENGTH = 1024  # tokens in a row, for a model that no run here has trained


@dataclass(frozen=True)
class Answer:
    task: builtin.Question
    reply: str
    is_correct: bool


def answer_held_out_questions(
    generator: Generator, per_family: int, families: tuple[str, ...] | None = None
) -> dict[str, list[Answer]]:
    """Greedy answers to built-in questions that are never trained on, by family."""
    names = families or tuple(builtin.FAMILIES)
    drawn = (builtin.instructions(per_family, seed=1, families=(name,), split="held_out") for name in names)
    tasks = [task for family in drawn for task in family]
    encoder = PromptEncoder(generator.loaded.tokenizer)
    replies = generator((Prompt(encoder.prompt(task.prompt)) for task in tasks), SamplingParams(max_tokens=32))
    answers = [
        Answer(task, reply.text, builtin.is_correct(task, reply.text))
        for task, reply in zip(tasks, replies, strict=True)
    ]
    return {name: [answer for answer in answers if answer.task.family == name] for name in names}


def exact_match(answers: list[Answer]) -> float:
    """The share of correct answers."""
    return sum(answer.is_correct for answer in answers) / len(answers) if answers else math.nan


def held_out_losses(loaded: LoadedModel, rows: int | None, required: bool) -> Losses | None:
    """On the first held-out rows of the model's run. Where there are none: None and a line; an error if `required`."""
    run = loaded.run
    if run is None:
        reason = f"{loaded.path} is of no run here, so it has no held-out rows"
    else:
        artefact = artefact_of(run)
        if len(artefact.eval):
            return document_losses(loaded, artefact, "eval", rows or read_config(run.config).train.eval_rows)
        reason = f"{run.path}: no rows were held out (data.eval_fraction, data.eval_sources)"
    advice = "to score a file: --data FILE"
    if required:
        raise UserError(f"nothing to evaluate: {reason}; {advice}")
    print(f"note: {reason}; {advice}", file=sys.stderr, flush=True)
    return None


def check_source(path: str) -> None:
    """Before a model is loaded for it."""
    open_source(Source(path=path), Columns(), True, lambda line: None)


def file_losses(loaded: LoadedModel, path: str, rows: int | None, like: RunFolder | None) -> Losses:
    """On a file, prepared with the settings of the run `like`, so that models that are compared get the same rows."""
    assert loaded.tokenizer_folder is not None  # noqa: S101
    artefact = prepare_file(path, loaded.tokenizer_folder, loaded.is_chat, context_length(loaded.model), like)
    if artefact.is_pairs:
        raise UserError(f"--data: {path} holds preference pairs, which have no loss of one answer")
    return document_losses(loaded, artefact, "train", rows or len(artefact.train))


def prepare_file(path: str, tokenizer: Path, is_chat: bool, context: int, like: RunFolder | None) -> Artefact:
    """With a model's own tokenizer and template; all of it is in the split `train`."""
    given = read_config(like.config).data if like is not None else DataConfig()
    sources = named_sources([Source(path=path)], given.dataset_dir)
    changes = {
        "sources": sources, "eval_sources": [], "eval_fraction": 0.0, "take": None, "clean": CleanConfig(),
        "tokenizer": str(tokenizer), "template": "auto" if is_chat else "plain",
        "max_length": min(context, given.max_length if like is not None else _MAX_LENGTH),
    }  # fmt: skip
    return prepare(given.model_copy(update=changes), prepared_folder())
