"""`sojourn eval`: metrics as published, intervals, several models side by side, files of questions."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import called
from sojourn.evals import intervals
from sojourn.evals.choices import score_choices
from sojourn.evals.compare import ModelScores, Result, compare
from sojourn.evals.intervals import Estimate
from sojourn.evals.lm_eval_tasks import _of_task, _reason
from sojourn.evals.metrics import equal, exact_match, f1, regex, rouge_l
from sojourn.evals.report import as_html, as_lines, as_svg
from sojourn.evals.task_file import read_questions
from sojourn.infer.load import LoadedModel, load_model


@pytest.mark.parametrize(
    ("text", "answers", "match", "words"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),  # SQuAD: case, articles and punctuation do not count
        ("in the Eiffel Tower", ["Eiffel Tower"], 0.0, 0.8),
        ("Paris", ["London", "paris"], 1.0, 1.0),
        ("", [""], 1.0, 1.0),
        ("", ["something"], 0.0, 0.0),
        ("a the", ["an"], 1.0, 1.0),  # nothing but articles
        ("red red blue", ["red blue green"], 0.0, 2 / 3),
        ("它是红色的。", ["它是 红色的"], 1.0, 1.0),
        ("红色", ["红"], 0.0, 2 / 3),
        ("x", [], 0.0, 0.0),
    ],
)
def test_exact_match_and_f1_are_those_of_squad(text: str, answers: list[str], match: float, words: float) -> None:
    assert exact_match(text, answers) == match
    assert f1(text, answers) == pytest.approx(words)


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [  # as rouge-score 0.1.2 gives them, rougeL without a stemmer
        ("The quick brown fox jumps over the lazy dog", ["The quick brown dog jumps on the log."], 0.5882352941176471),
        ("police killed the gunman", ["police kill the gunman"], 0.75),
        ("the gunman kill police", ["police killed the gunman"], 0.5),
        ("", ["a"], 0.0),
        ("a_b c", ["a b", "c"], 0.8),
        ("今天天气好", ["今天天气很好"], 10 / 11),
    ],
)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(
    text: str, answers: list[str], score: float
) -> None:
    assert rouge_l(text, answers) == pytest.approx(score)


def test_rouge_l_of_random_words_is_that_of_the_textbook() -> None:
    rng = random.Random(1)
    for _ in range(60):
        one, other = ([rng.choice("abcde") for _ in range(rng.randrange(1, 70))] for _ in range(2))
        table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
        for i, left in enumerate(one):
            for j, right in enumerate(other):
                table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
        expected = 2 * table[-1][-1] / (len(one) + len(other))
        assert rouge_l(" ".join(one), [" ".join(other)]) == pytest.approx(expected)


def test_equal_and_regex() -> None:
    assert equal(" A b ", ["A b"]) == 1.0 and equal("a b", ["A b"]) == 0.0
    assert regex("so: 42.", r"\b42\b") == 1.0 and regex("421", r"\b42\b") == 0.0


def test_wilsons_interval_is_the_published_one() -> None:
    found = intervals.share(np.array([1.0] * 15 + [0.0] * 5))
    assert (found.value, found.low, found.high) == pytest.approx((0.75, 0.531299, 0.888138), abs=1e-6)
    assert intervals.share(np.ones(1)).low == pytest.approx(0.206549, abs=1e-5)
    assert intervals.share(np.zeros(3)).low == 0.0 and math.isnan(intervals.share(np.zeros(0)).value)


def test_the_bootstrap_agrees_with_the_normal_interval_and_a_single_example_has_none() -> None:
    scores = np.random.default_rng(1).normal(0.5, 0.2, 400)
    found, half = intervals.mean(scores), 1.96 * scores.std() / 20
    assert found.low == pytest.approx(scores.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(scores.mean() + half, abs=0.1 * half)
    assert math.isnan(intervals.mean(np.ones(1)).low)
    weights = np.arange(1.0, 401.0)
    ratio = intervals.ratio(scores * weights, weights)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.value == pytest.approx((scores * weights).sum() / weights.sum())


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 1, 300)
    ours, theirs, ones = hard + 0.1, hard + rng.normal(0, 0.05, 300), np.ones(300)
    found = intervals.difference((ours, ones), (theirs, ones))
    assert found.low > 0 and found.high - found.low < 0.1 * (intervals.mean(ours).high - intervals.mean(ours).low)


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(tiny.base), "cpu")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    records = [
        {"prompt": "What colour is the cat?", "answer": "red"},
        {"prompt": "What colour is the boat?", "answers": ["red", "blue"], "metric": "f1", "task": "colours"},
        {"messages": [{"role": "user", "content": "Say it."}], "answer": "a b", "metric": "rouge_l", "task": "colours"},
        {"prompt": "What colour is the lamp?", "choices": ["red", "It is a rather long answer.", "blue"], "answer": 2},
        {"prompt": "What colour is the tree?", "choices": ["red", "blue"], "answer": "blue", "task": "other"},
        {"prompt": "Anything", "pattern": "."},
        {"prompt": "Anything", "answer": 5, "extract": "([0-9]+)"},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_likelihoods_of_choices_are_those_of_the_model_whatever_is_beside_them(
    loaded: LoadedModel, questions: Path
) -> None:
    asked = [question for question in read_questions(str(questions)) if question.choices]
    found = score_choices(loaded, asked)
    for question, scores in zip(asked, found, strict=True):
        chat = [{"role": "user", "content": question.row.text}]
        prompt = loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt_ids = loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for choice, score in zip(question.choices, scores, strict=True):
            ids = prompt_ids + loaded.tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logs = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(logs[at - 1, ids[at]]) for at in range(len(prompt_ids), len(ids)))
            assert score == pytest.approx(expected, abs=1e-4)


def test_models_side_by_side_with_a_page_of_plots(tiny, questions: Path, tmp_path: Path) -> None:
    run = tiny.whole("method.kind=lora", "method.rank=4", "train.lr=1e-3", "save.every_steps=6", "save.keep=9",
                     "data.eval_fraction=0.1")  # fmt: skip
    page, one = tmp_path / "report.html", tiny.chats
    said = called("eval", str(tiny.base), run.path.name, "--task", str(questions), "--data", str(one), "--rows", "4",
                  "--max-tokens", "4", "--json", "--html", str(page))  # fmt: skip
    assert said.returncode == 0, said.stderr
    rows = json.loads(said.stdout)["results"]
    by_metric = {(row["model"], row["what"], row["metric"]): row for row in rows}
    base = str(tiny.base)
    assert {"loss", "perplexity", "bits_per_byte", "accuracy"} <= {row["metric"] for row in rows}
    assert by_metric[run.path.name, "other", "acc"]["examples"] == 1
    assert by_metric[base, "questions", "regex"]["value"] in (0.0, 1.0)
    assert {"acc", "acc_norm", "exact_match"} <= {m for _, what, m in by_metric if what == "questions"}
    ours, theirs = by_metric[run.path.name, str(one), "loss"], by_metric[base, str(one), "loss"]
    assert theirs["difference"] is None and ours["difference"]["value"] == pytest.approx(
        ours["value"] - theirs["value"]
    )
    assert ours["difference"]["high"] < 0  # training helped
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == len({(row["what"], row["metric"]) for row in rows}) and "http" not in re.sub(
        r"http://www.w3.org/2000/svg", "", html
    )
    steps = called("eval", run.path.name, "--checkpoints", "all", "--tasks", "0")
    assert steps.returncode == 0 and "step 6" in steps.stdout and "step 12" in steps.stdout, steps.stderr
    assert "held-out: loss" in steps.stdout and "[" in steps.stdout


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "it needs answer, answers, choices or pattern"),
        ({"prompt": "a", "answers": []}, "there is none"),
        ({"prompt": "a", "choices": ["a"], "answer": 0}, "at least two"),
        ({"prompt": "a", "choices": ["a", "b"], "answer": 2}, "2 is none of the 2 choices"),
        ({"prompt": "a", "choices": ["x", "y"], "answer": "z"}, "“z” is none"),
        ({"prompt": "a", "pattern": "("}, "not a regular expression"),
        ({"prompt": "a", "answer": "b", "metric": "exactmatch"}, "did you mean exact_match?"),
        ({"answer": "b"}, "expected a column prompt or messages"),
    ],
)
def test_a_record_that_is_no_question_is_one_line(record: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"prompt": "fine", "answer": "yes"}\n' + json.dumps(record) + "\n")
    said = called("eval", "no-such-model", "--task", str(path))
    assert said.returncode == 2 and message in said.stderr and f"{path}:2" in said.stderr
    assert said.stderr.count("\n") == 1


def test_an_empty_file_a_letter_and_lm_eval_that_is_not_installed(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text("")
    assert "it has no questions" in called("eval", "m", "--task", str(path)).stderr
    path.write_text('{"prompt": "a", "choices": ["x", "y", "z"], "answer": "C"}\n')
    assert read_questions(str(path))[0].correct == 2
    said = called("eval", "m", "--lm-eval", "hellaswag")
    assert said.returncode == 2 and ("pip install lm-eval" in said.stderr or "no run is called" in said.stderr)


def test_results_of_lm_eval_have_our_intervals_where_they_are_means_over_documents() -> None:
    """As lm-eval 0.4.13 gives them."""
    facts = {
        "alias": "t", "sample_len": 4, "acc,none": 0.75, "acc_stderr,none": 0.25, "word_perplexity,none": 21.5,
        "word_perplexity_stderr,none": "N/A", "f1,strict": 0.5, "f1_stderr,strict": 0.1,
    }  # fmt: skip
    samples = [
        {"filter": "none", "doc_hash": str(at), "acc": float(at > 0), "word_perplexity": (-9.0, 3)} for at in range(4)
    ]
    samples += [{"filter": "strict", "doc_hash": str(at), "f1": 0.25 + at / 6} for at in range(4)]
    acc, perplexity, f1_score = _of_task("t", facts, samples, 4)
    assert (acc.metric, acc.kind, acc.estimate()) == ("acc", "share", intervals.share(np.array([0.0, 1.0, 1.0, 1.0])))
    assert (perplexity.kind, perplexity.estimate().value, perplexity.count) == ("number", 21.5, 4)
    assert math.isnan(perplexity.estimate().low)
    assert (f1_score.metric, f1_score.kind, f1_score.error) == ("f1 (strict)", "mean", None)
    rows = compare([ModelScores("a", None, [acc, perplexity]), ModelScores("b", None, [acc, perplexity])])
    assert [row.examples for row in rows] == [4, 4, 4, 4]
    assert rows[2].difference is not None and rows[2].difference.value == 0 and rows[3].difference is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("Spec 'x' is not a registered task/group/tag name or valid YAML path"), "no such task"),
        (ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub"), "its data set cannot be downloaded here"),
        (ValueError("a\nb"), "a b"),
    ],
)
def test_errors_of_lm_eval_are_one_line(error: Exception, message: str) -> None:
    assert _reason(error).startswith(message) and "\n" not in _reason(error)


@pytest.mark.slow
def test_lm_eval_runs_a_task_of_local_data(tiny, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    rows = [{"q": f"{at} and {at}", "choices": ["red", "blue"], "answer": at % 2} for at in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    task = {
        "task": "colours", "dataset_path": "json", "dataset_kwargs": data,
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{q}} is", "doc_to_target": "answer",
        "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc", "aggregation": "mean"}],
    }  # fmt: skip
    (tmp_path / "colours.yaml").write_text(json.dumps(task))  # JSON is YAML
    base, page = str(tiny.base), tmp_path / "page.html"
    said = called("eval", base, base, "--lm-eval", str(tmp_path / "colours.yaml"), "--json", "--html", str(page))
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)["results"]
    assert [(one["what"], one["metric"], one["examples"]) for one in found] == [("colours", "acc", 4)] * 2
    assert found[1]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0} and "colours: acc" in page.read_text()
    unknown = called("eval", base, "--lm-eval", "no_such_task")
    assert unknown.returncode == 1 and "no such task" in unknown.stderr and unknown.stderr.count("\n") == 1


def test_checkpoints_are_drawn_over_steps_in_the_terminal_and_as_svg() -> None:
    rows = [
        Result("small", step, "held-out", "loss", "loss", 8, Estimate(value, value - 0.1, value + 0.1))
        for step, value in ((100, 3.0), (200, 2.0), (300, 1.5))
    ]
    lines = as_lines(rows)
    assert len(lines) > 10 and any("┤" in line for line in lines) and lines[-1].split() == ["step", "0", "300"]
    assert not any("┤" in line for line in as_lines(rows[:2]))
    drawn = as_svg(rows, "title")
    assert "<polyline" in drawn and "held-out: loss by step" in drawn and drawn.count("<circle") == 3
    html = as_html(rows, "title")
    assert html.count("held-out: loss<") == 2 and "difference from the first" not in html  # heading and SVG's title
