"""A file of questions to score a model with. docs/eval.md has the fields of a record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sojourn.config.messages import did_you_mean
from sojourn.data.sources.values import BadRecord, Record, check_text, kind_name
from sojourn.errors import UserError
from sojourn.evals.metrics import OF_ANSWERS
from sojourn.infer.prompt_file import PromptRow, check_prompt_file, read_prompts

Kind = Literal["answers", "choices", "pattern"]
METRICS = (*OF_ANSWERS, "regex", "multiple_choice")
_FIELDS = {"task", "metric", "answer", "answers", "choices", "pattern", "extract"}


@dataclass(frozen=True)
class Question:
    """`answers`: any of them is right. `correct`: the index of the right choice. `extract`: a pattern whose first group
    (or whole match) is the answer within the reply."""

    row: PromptRow
    task: str
    metric: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    correct: int = 0
    pattern: str = ""
    extract: str = ""

    @property
    def where(self) -> str:
        return self.row.where


def read_questions(path: str) -> list[Question]:
    """Raises UserError at the first record that is no question."""
    file = check_prompt_file(path, "--task")
    questions = list(_read(file))
    if not questions:
        raise UserError(f"--task: {path}: it has no questions")
    return questions


def _read(file: Path) -> Iterator[Question]:
    name = file.name.partition(".")[0]
    for row in read_prompts(file):
        try:
            yield _question(row, name)
        except BadRecord as error:
            raise UserError(f"{row.where}: {error}") from None


def _question(row: PromptRow, name: str) -> Question:
    record = row.columns
    task = check_text(record.get("task", name), "task")
    metric = _metric(record)
    if metric == "multiple_choice":
        choices = _texts(record.get("choices"), "choices")
        if len(choices) < 2:
            raise BadRecord("choices: at least two are needed")
        return Question(row, task, metric, choices=choices, correct=_correct(record.get("answer"), choices))
    if metric == "regex":
        return Question(row, task, metric, pattern=_pattern(record.get("pattern"), "pattern"))
    answers = _texts(record["answers"] if "answers" in record else record.get("answer"), "answer")
    if not answers:
        raise BadRecord("answers: there is none")
    extract = _pattern(record["extract"], "extract") if record.get("extract") is not None else ""
    return Question(row, task, metric, answers=answers, extract=extract)


def _metric(record: Record) -> str:
    """As the record says, or by the fields it has."""
    given = record.get("metric")
    if given is None:
        if record.get("choices") is not None:
            return "multiple_choice"
        if record.get("pattern") is not None:
            return "regex"
        if record.get("answer") is not None or record.get("answers") is not None:
            return "exact_match"
        raise BadRecord("nothing to score with: it needs answer, answers, choices or pattern")
    if given not in METRICS:
        raise BadRecord(f"metric {str(given)[:30]}: unknown{did_you_mean(str(given), METRICS)}; {', '.join(METRICS)}")
    return str(given)


def _texts(value: Any, key: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(check_text(str(one) if type(one) in (int, float) else one, key) for one in values)


def _correct(answer: Any, choices: tuple[str, ...]) -> int:
    """An index from 0, a letter from A, or the text of a choice."""
    if isinstance(answer, str):
        if choices.count(answer) == 1:
            return choices.index(answer)
        if len(answer) == 1 and 0 <= ord(answer.upper()) - ord("A") < len(choices):
            return ord(answer.upper()) - ord("A")
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    given = f"“{answer[:40]}”" if isinstance(answer, str) else answer if type(answer) is int else kind_name(answer)
    raise BadRecord(f"answer: {given} is none of the {len(choices)} choices: an index from 0, a letter or a text")


def _pattern(value: Any, key: str) -> str:
    try:
        re.compile(check_text(value, key))
    except re.error as error:
        raise BadRecord(f"{key}: not a regular expression: {error}") from None
    return str(value)
