"""The built-in data: the same for the same seed everywhere, true answers, and nothing held out is ever trained on."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import date, timedelta
from itertools import islice

import pytest

from sojourn.data import builtin
from sojourn.data.builtin import Question

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WEEKDAYS_ZH = ("星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
MONTHS_ZH = ("一月", "二月", "三月", "四月", "五月", "六月", "七月", "八月", "九月", "十月", "十一月", "十二月")


def digest(parts: list[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def text_digest() -> str:
    return digest([document.text for document in islice(builtin.text(10**9), 500)])


def question_digest(split: builtin.Split = "train") -> str:
    questions = builtin.instructions(2000, split=split)
    return digest([f"{t.family}|{t.language}|{t.key}|{t.prompt}|{t.answer}" for t in questions])


def test_the_data_is_what_it_was() -> None:
    """A change here is a change of everyone's prepared data: raise VERSION with it."""
    assert builtin.VERSION == 1
    assert text_digest() == "c91cf3b311240891"
    assert question_digest() == "6dc65f2b4b3bc884"
    assert question_digest("held_out") == "0ba8d1ad2e370b20"


def test_the_data_does_not_depend_on_the_process() -> None:
    program = "import test_builtin as t; print(t.text_digest(), t.question_digest())"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [text_digest(), question_digest()]


def test_another_seed_gives_other_data() -> None:
    first, second = (next(builtin.text(1, seed=seed)).text for seed in (0, 1))
    assert first != second
    questions = [
        {question.prompt for question in builtin.instructions(500, seed=seed, families=["lookup"])} for seed in (0, 1)
    ]
    assert len(questions[0] & questions[1]) < 5


@pytest.mark.parametrize("wanted", [1, 1000, 1_000_000])
def test_there_is_as_much_text_as_was_asked_for(wanted: int) -> None:
    made = sum(len(document.text.encode()) for document in builtin.text(wanted))
    assert wanted <= made < wanted + 10_000


def test_a_longer_text_begins_with_the_shorter_one() -> None:
    short = [document.text for document in builtin.text(20_000)]
    long = [document.text for document in builtin.text(40_000)]
    assert long[: len(short)] == short
    assert len(long) > len(short)


def test_texts_hardly_ever_repeat() -> None:
    texts = [document.text for document in builtin.text(10_000_000)]
    assert len(set(texts)) > 0.99 * len(texts)


def test_texts_are_filled_in_and_closed() -> None:
    for document in builtin.text(1_000_000):
        assert "{" not in document.text and "}" not in document.text
        assert "  " not in document.text
        assert document.text[-1] in '.。!！?？”"'


def test_both_languages_and_all_kinds_are_there() -> None:
    where = Counter(document.where.split("(")[1].rstrip(")") for document in builtin.text(1_000_000))
    assert len(where) == 12
    assert min(where.values()) > 0.5 * max(where.values())
    chinese = [document.text for document in builtin.text(50_000, languages=("zh",))]
    assert all(re.search("[\u4e00-\u9fff]", text) for text in chinese)
    english = [document.text for document in builtin.text(50_000, languages=("en",))]
    assert not any(re.search("[\u4e00-\u9fff]", text) for text in english)


def test_tasks_come_in_the_families_and_languages_asked_for() -> None:
    questions = Counter((t.family, t.language) for t in builtin.instructions(12_000))
    assert {family for family, _ in questions} == set(builtin.FAMILIES)
    assert min(questions.values()) > 350
    weighted = Counter(t.family for t in builtin.instructions(4000, families={"add": 3.0, "sort": 1.0}))
    assert 2800 < weighted["add"] < 3200
    assert weighted["add"] + weighted["sort"] == 4000
    assert {t.language for t in builtin.instructions(200, languages=("zh",))} == {"zh"}
    assert len(list(islice(builtin.instructions(), 50))) == 50


def test_an_unknown_family_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="addition"):
        builtin.instructions(1, families=["addition"])


@pytest.mark.parametrize("family", sorted(builtin.FAMILIES))
def test_nothing_held_out_is_trained_on(family: str) -> None:
    train = list(builtin.instructions(6000, seed=3, families=[family]))
    held = list(builtin.instructions(1500, seed=4, families=[family], split="held_out"))
    assert not {t.key for t in train} & {t.key for t in held}
    assert not {t.prompt for t in train} & {t.prompt for t in held}
    assert {t.split for t in train} == {"train"} and {t.split for t in held} == {"held_out"}
    assert {t.language for t in held} == {"en", "zh"}


def test_a_tenth_of_the_keys_is_held_out() -> None:
    held = sum(builtin.split_of("add", f"{a},{b}") == "held_out" for a in range(100) for b in range(a, 100))
    assert 0.08 < held / 5050 < 0.12


def test_every_fact_about_sojourn_has_wordings_in_training() -> None:
    wordings = {(t.key, t.language, t.answer) for t in builtin.instructions(20_000, families=["about"])}
    facts = Counter((key.split("/")[0], language) for key, language, _ in wordings)
    assert len(facts) == 2 * 28
    assert min(facts.values()) >= 2


def test_every_answer_verifies_and_others_do_not() -> None:
    for question in builtin.instructions(3000, seed=9):
        assert builtin.is_correct(question, question.answer)
        assert builtin.is_correct(question, f" {question.answer}\n")
        assert not builtin.is_correct(question, "")
        assert not builtin.is_correct(question, question.answer + "0")
    number = Question("add", "en", "1,2", "1+2=", "3")
    assert builtin.is_correct(number, "3.")
    assert builtin.is_correct(number, "３。")
    assert not builtin.is_correct(number, "It is 3")
    assert not builtin.is_correct(number, "3 3")


def numbers(prompt: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", prompt)]


def last_line(prompt: str) -> str:
    return prompt.rsplit("\n", 1)[1]


def larger_or_smaller(prompt: str) -> str:
    return str((max if re.search("[Ll]arger|大", prompt) else min)(numbers(prompt)))


def difference(prompt: str) -> str:
    first, second = numbers(prompt)
    return str(abs(first - second))


def in_order(prompt: str) -> str:
    row = re.search(r"[:：] ?(.*)$", prompt)
    assert row is not None
    items = row[1].split()
    return " ".join(sorted(items, key=int) if items[0].isdigit() else sorted(items))


def how_many(prompt: str) -> str:
    asked = re.search(r"does (\w+) occur|Count (\w+) in|times is (\w+) there|“(\w+)”", prompt)
    row = prompt.split("\n", maxsplit=1)[0] if "\n" in prompt else re.split(r"[:：] ?", prompt, maxsplit=1)[1]
    words = row.split()
    return str(words.count(next(filter(None, asked.groups())))) if asked else str(len(words))


def told_number(prompt: str) -> str:
    facts = re.findall(r"(\w+) has (\d+) (\w+)\. ", prompt) or re.findall(r"(\w+)有(\d+)个(\w+)。", prompt)
    last_sentence = re.split(r"\. |。", prompt)[-1]
    [answer] = [n for name, n, thing in facts if name in last_sentence and thing in last_sentence]
    return str(answer)


def other_date(prompt: str) -> str:
    step = timedelta(-1 if re.search("before|yesterday|前一天|昨天", prompt) else 1)
    if english := re.search(r"(\d+) ([A-Z]\w+)", prompt):
        day = date(2023, MONTHS.index(english[2]) + 1, int(english[1])) + step
        return f"{day.day} {MONTHS[day.month - 1]}"
    month, number = numbers(prompt)
    day = date(2023, month, number) + step
    return f"{day.month}月{day.day}日"


def other_name(prompt: str, names: tuple[str, ...]) -> str:
    [start] = [
        name for name in names if name in prompt and not any(name != n and name in n and n in prompt for n in names)
    ]
    [n] = numbers(prompt)
    back = re.search("before|ago|之前|往前|天前|月前", prompt) is not None
    return names[(names.index(start) + (-n if back else n)) % len(names)]


SOLVERS: dict[str, Callable[[str], str]] = {
    "echo_number": last_line,
    "echo_phrase": last_line,
    "compare": larger_or_smaller,
    "add": lambda prompt: str(sum(numbers(prompt))),
    "subtract": difference,
    "sort": in_order,
    "count": how_many,
    "lookup": told_number,
    "date": other_date,
    "weekday": lambda prompt: other_name(prompt, WEEKDAYS if "day" in prompt else WEEKDAYS_ZH),
    "month": lambda prompt: other_name(prompt, MONTHS if "month" in prompt else MONTHS_ZH),
}


@pytest.mark.parametrize("family", sorted(SOLVERS))
def test_the_answers_are_right(family: str) -> None:
    for question in builtin.instructions(1500, seed=11, families=[family]):
        assert SOLVERS[family](question.prompt) == question.answer, question.prompt


def test_every_family_but_the_one_of_fixed_facts_is_solved_independently() -> None:
    assert set(builtin.FAMILIES) - set(SOLVERS) == {"about"}
