"""Scores of one or several models on data sets and questions: values with confidence intervals, and how each model
differs from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sojourn.data.sources.values import BadRecord
from sojourn.errors import UserError
from sojourn.evals import intervals
from sojourn.evals.choices import score_choices
from sojourn.evals.intervals import Estimate
from sojourn.evals.losses import Losses, perplexity
from sojourn.evals.metrics import OF_ANSWERS, regex
from sojourn.evals.task_file import Question
from sojourn.infer.generate import Generator, Prompt
from sojourn.infer.load import LoadedModel
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams

Kind = Literal["share", "mean", "loss", "bits", "number"]


@dataclass(frozen=True)
class Measured:
    """A metric of one model: sums and weights by example. `examples`: what they are, so that only equal ones are
    compared. `error`, `count`: standard error and examples of a value that another program has measured."""

    what: str
    metric: str
    kind: Kind
    sums: np.ndarray
    weights: np.ndarray
    examples: str
    error: float | None = None
    count: int | None = None

    def estimate(self) -> Estimate:
        if self.error is not None:
            value = float(self.sums[0])
            return Estimate(value, value - 1.96 * self.error, value + 1.96 * self.error)
        return intervals.share(self.sums) if self.kind == "share" else intervals.ratio(self.sums, self.weights)


@dataclass(frozen=True)
class Result:
    """`step`: of a checkpoint. `difference`: from the first model, over the same examples."""

    model: str
    step: int | None
    what: str
    metric: str
    kind: str
    examples: int
    estimate: Estimate
    difference: Estimate | None = None


@dataclass(frozen=True)
class ModelScores:
    model: str
    step: int | None
    measured: list[Measured]


def compare(scores: Sequence[ModelScores]) -> list[Result]:
    first = {(one.what, one.metric): one for one in scores[0].measured} if scores else {}
    results = []
    for of_model in scores:
        for one in of_model.measured:
            base = first.get((one.what, one.metric))
            difference = None
            if of_model is not scores[0] and base is not None and base.examples == one.examples and one.error is None:
                difference = intervals.difference((one.sums, one.weights), (base.sums, base.weights))
            count, estimate = one.count or len(one.sums), one.estimate()
            given = (of_model.model, of_model.step, one.what)
            results.append(Result(*given, one.metric, one.kind, count, estimate, difference))
            if one.metric == "loss":
                grown = Estimate(*map(perplexity, (estimate.value, estimate.low, estimate.high)))
                results.append(Result(*given, "perplexity", "perplexity", count, grown))
    return results


def measure_losses(losses: Losses, what: str) -> list[Measured]:
    examples = f"{losses.data} {losses.rows}"
    found = [
        Measured(what, "loss", "loss", losses.loss, losses.tokens, examples),
        Measured(what, "accuracy", "mean", losses.correct, losses.tokens, examples),
    ]
    if losses.bytes.sum():
        found.insert(1, Measured(what, "bits_per_byte", "bits", losses.loss / math.log(2), losses.bytes, examples))
    return found


def measure_questions(questions: Sequence[Question], scored: dict[int, dict[str, float]]) -> list[Measured]:
    """By task and metric. `scored`: of each question, by `answer_questions` or `choose_answers`."""
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for at, question in enumerate(questions):
        for metric, score in scored[at].items():
            groups.setdefault((question.task, metric), []).append((question.where, score))
    measured = []
    for (task, metric), rows in groups.items():
        scores = np.array([score for _, score in rows])
        kind: Kind = "mean" if metric in ("f1", "rouge_l") else "share"
        examples = f"{len(rows)} {rows[0][0]}"
        measured.append(Measured(task, metric, kind, scores, np.ones(len(scores)), examples))
    return measured


def answer_questions(
    generator: Generator, questions: Sequence[Question], max_tokens: int
) -> dict[int, dict[str, float]]:
    """Scores of the replies to the questions that need one; greedy decoding."""
    encoder, prompts = PromptEncoder(generator.loaded.tokenizer), dict[int, Prompt]()
    for at, question in enumerate(questions):
        if question.metric == "multiple_choice":
            continue
        try:
            ids = question.row.encode(encoder, raw=False)
        except BadRecord as error:
            raise UserError(f"{question.where}: {error}") from None
        reason = generator.check(ids)
        if reason is not None:
            raise UserError(f"{question.where}: the prompt: {reason}")
        prompts[at] = Prompt(ids)
    replies = generator(prompts.values(), SamplingParams(max_tokens=max_tokens))
    scores = {}
    for at, reply in zip(prompts, replies, strict=True):
        question = questions[at]
        if question.metric == "regex":
            scores[at] = {"regex": regex(reply.text, question.pattern)}
        else:
            text = _extracted(reply.text, question.extract)
            scores[at] = {question.metric: OF_ANSWERS[question.metric](text, question.answers)}
    return scores


def _extracted(text: str, pattern: str) -> str:
    import re

    found = re.search(pattern, text) if pattern else None
    if found is None:
        return "" if pattern else text
    return str(found[1] if found.re.groups else found[0]) or ""


def choose_answers(loaded: LoadedModel, questions: Sequence[Question]) -> dict[int, dict[str, float]]:
    """`acc`: the likeliest choice is right. `acc_norm`: the likeliest by character, as in lm-eval."""
    at = [index for index, question in enumerate(questions) if question.metric == "multiple_choice"]
    scores = {}
    for index, found in zip(at, score_choices(loaded, [questions[index] for index in at]), strict=True):
        question = questions[index]
        lengths = np.array([len(choice) for choice in question.choices])
        scores[index] = {
            "acc": float(found.argmax() == question.correct),
            "acc_norm": float((found / lengths).argmax() == question.correct),
        }
    return scores
