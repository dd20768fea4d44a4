"""One call of `sojourn eval`: every model on every data set and task, one model in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sojourn.errors import UserError
from sojourn.evals.compare import (
    Measured,
    ModelScores,
    answer_questions,
    choose_answers,
    measure_losses,
    measure_questions,
)
from sojourn.evals.held_out import answer_held_out_questions, file_losses, held_out_losses
from sojourn.evals.lm_eval_tasks import measure_lm_eval
from sojourn.evals.task_file import Question
from sojourn.infer.find import find_model
from sojourn.infer.generate import Generator
from sojourn.infer.load import LoadedModel, load_model
from sojourn.machine.out_of_memory import free_memory
from sojourn.run.checkpoints import list_checkpoints, step_of
from sojourn.run.folder import RunFolder
from sojourn.run.home import find_run
from sojourn.run.identity import MODEL_MARK
from sojourn.storage.files import read_json_object


@dataclass(frozen=True)
class EvalJob:
    """`builtin`: built-in questions per family; None is 50 where nothing else is asked for."""

    data: Sequence[str] = ()
    questions: Sequence[Question] = ()
    lm_eval: Sequence[str] = ()
    rows: int | None = None
    builtin: int | None = None
    max_tokens: int = 128
    device: str = "auto"
    limit: int | None = field(default=None)  # questions of each lm-eval task

    @property
    def is_default(self) -> bool:
        return not (self.data or self.questions or self.lm_eval)


def choose_models(
    models: Sequence[str], checkpoint: str | None, checkpoints: str | None
) -> list[tuple[str, str | None]]:
    """Names with the checkpoint of each. `checkpoints`: all, or steps and names between commas."""
    if checkpoints is None:
        return [(name, checkpoint) for name in models]
    if checkpoint is not None:
        raise UserError("give either --checkpoint or --checkpoints")
    chosen: list[tuple[str, str | None]] = []
    for name in models:
        run = find_run(name)
        if checkpoints != "all":
            chosen += [(name, one.strip()) for one in checkpoints.split(",") if one.strip()]
            continue
        steps = [step_of(path) for path in list_checkpoints(run.checkpoints)]
        final = read_json_object(run.final / MODEL_MARK).get("step") if run.has_final() else None
        chosen += [(name, str(step)) for step in steps if step != final]
        chosen += [(name, "final")] if run.has_final() else []
    if not chosen:
        raise UserError("--checkpoints: there is none yet")
    return chosen


def run_eval(models: Sequence[tuple[str, str | None]], job: EvalJob) -> list[ModelScores]:
    scores: list[ModelScores] = []
    runs = [find_model(name, checkpoint).run for name, checkpoint in models] if job.data else []
    like = next((run for run in runs if run is not None), None)
    for number, (name, checkpoint) in enumerate(models, 1):
        if len(models) > 1:
            print(f"{number}/{len(models)} {name} {checkpoint or ''}".rstrip(), file=sys.stderr, flush=True)
        loaded = load_model(name, job.device, checkpoint)
        scores.append(ModelScores(name, _step(loaded), _measure(loaded, job, like)))
        del loaded
        free_memory()
    return scores


def _measure(loaded: LoadedModel, job: EvalJob, like: RunFolder | None) -> list[Measured]:
    """What the model scores comes first: then the engine takes its weights, and generates."""
    count = 50 if job.builtin is None and job.is_default else job.builtin or 0
    asks = count > 0 and loaded.is_chat
    losses: list[Measured] = []
    for path in job.data:
        losses += measure_losses(file_losses(loaded, path, job.rows, like), path)
    if job.is_default:
        held_out = held_out_losses(loaded, job.rows, required=not asks)
        losses += measure_losses(held_out, "held-out") if held_out is not None else []
    lm_eval = measure_lm_eval(loaded, list(job.lm_eval), job.limit) if job.lm_eval else []
    scored = choose_answers(loaded, job.questions)
    builtin: list[Measured] = []
    if asks or len(scored) < len(job.questions):
        generator = Generator(loaded)
        builtin = _measure_builtin(generator, count) if asks else []
        scored |= answer_questions(generator, job.questions, job.max_tokens)
    return [*losses, *builtin, *measure_questions(job.questions, scored), *lm_eval]


def _measure_builtin(generator: Generator, count: int) -> list[Measured]:
    measured = []
    for family, answers in answer_held_out_questions(generator, count).items():
        scores = np.array([float(answer.is_correct) for answer in answers])
        examples = f"builtin {family} {count}"
        measured.append(Measured(family, "exact_match", "share", scores, np.ones(len(scores)), examples))
    return measured


def _step(loaded: LoadedModel) -> int | None:
    """Of a run's checkpoint or model."""
    if loaded.run is None:
        return None
    if loaded.path.name.startswith("step-"):
        return step_of(loaded.path)
    step = read_json_object(loaded.path / MODEL_MARK).get("step")
    return step if type(step) is int else None
