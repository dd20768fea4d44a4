"""Thumbs, corrections and votes: kept as data sets, changed when somebody changes their mind, read by `prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import called
from serve_engine import Served, ThreadEngine, serving
from sojourn.data.sources.formats import detect_format, to_document
from sojourn.errors import UserError
from sojourn.infer.load import load_model
from sojourn.serve import feedback as feedback_module
from sojourn.serve.feedback import PREFERENCES, SFT, FeedbackFolder, feedback_folder

PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a cat?"},
    {"role": "assistant", "content": "An animal."},
    {"role": "user", "content": "What colour is it?"},
]
GOOD, BAD = {"role": "assistant", "content": "Grey."}, {"role": "assistant", "content": "It is a dog."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "feedback"


@pytest.fixture
def served(tiny, folder: Path):
    with serving(ThreadEngine(load_model(str(tiny.base), "cpu")), feedback=FeedbackFolder(folder)) as made:
        yield made


def send(served: Served, kind: str, id: str = "answer-1", **given: Any) -> int:
    body = {"id": id, "kind": kind, "model": "tiny", "prompt": PROMPT, **given}
    return int(served.post("/v1/feedback", body).status_code)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_prepare_reads_what_the_page_saves(tiny, served: Served, folder: Path, tmp_path: Path) -> None:
    for number in range(4):
        assert send(served, "like", f"liked-answer-{number}", chosen={**GOOD, "content": f"Grey, {number}."}) == 200
    assert send(served, "dislike", "disliked-answer", rejected=BAD) == 200
    assert send(served, "correction", "corrected-answer", chosen=GOOD, rejected=BAD) == 200
    for number in range(3):
        chosen = {"role": "assistant", "content": f"Black {number}."}
        assert send(served, "preference", f"pair-of-answers-{number}", chosen=chosen, rejected=BAD) == 200
    for name, texts, absent in (
        (SFT, ["Grey, 0.", "Grey, 3.", "Grey."], "It is a dog."),
        (PREFERENCES, ["Grey.", "Black 0.", "Black 2.", "It is a dog."], "Grey, 0."),
    ):
        out = tmp_path / name
        tokenizer = ("model.base=" + str(tiny.base), "data.max_length=256", "data.eval_fraction=0")
        done = called("prepare", "lora-20k", "--train_file", str(folder / name), "--output_dir", str(out), *tokenizer)
        assert done.returncode == 0, done.stderr
        prepared = "".join(path.read_text() for path in out.glob("*.jsonl"))
        assert all(text in prepared for text in texts) and absent not in prepared, prepared


def test_earlier_answers_are_context_and_only_the_judged_one_is_a_target(served: Served, folder: Path) -> None:
    assert send(served, "like", chosen=GOOD) == 200
    (row,) = rows(folder, SFT)
    document = to_document(row, detect_format(row), "here")
    assert [one.trained for one in document.messages if one.role == "assistant"] == [False, True]


def test_tool_calls_are_kept(served: Served, folder: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = [*PROMPT, answer, {"role": "tool", "content": "rain", "tool_call_id": "c1"}]
    assert send(served, "correction", prompt=prompt, chosen=answer, rejected=BAD, tools=tools) == 200
    for name in (SFT, PREFERENCES):
        (row,) = rows(folder, name)
        document = to_document(row, detect_format(row), "here")
        assert document.messages[-1].tool_calls and document.tools


def test_who_changes_their_mind_replaces_the_row(served: Served, folder: Path) -> None:
    assert send(served, "like", "the-other-answer", chosen=GOOD) == 200
    assert send(served, "like", chosen=GOOD) == send(served, "dislike", rejected=GOOD) == 200
    assert {row["id"]: row["label"] for row in rows(folder, SFT)} == {"the-other-answer": True, "answer-1": False}
    assert send(served, "none", prompt=[]) == 200
    assert [row["id"] for row in rows(folder, SFT)] == ["the-other-answer"]
    assert send(served, "correction", chosen=GOOD, rejected=BAD) == 200
    assert send(served, "none", prompt=[]) == 200
    assert rows(folder, PREFERENCES) == []


def test_only_their_owner_can_read_what_people_said(served: Served, folder: Path) -> None:
    assert send(served, "correction", chosen=GOOD, rejected=BAD) == 200
    assert send(served, "correction", chosen={**GOOD, "content": "Black."}, rejected=BAD) == 200  # it is rewritten
    assert folder.stat().st_mode & 0o077 == 0
    assert all((folder / name).stat().st_mode & 0o077 == 0 for name in (SFT, PREFERENCES))


def test_what_is_no_feedback_is_refused(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, given in (
        ("like", {}),
        ("like", {"chosen": GOOD, "rejected": BAD}),
        ("dislike", {"chosen": GOOD}),
        ("like", {"chosen": {"role": "assistant", "content": ""}}),
        ("like", {"chosen": GOOD, "prompt": []}),
        ("preference", {"chosen": GOOD, "rejected": GOOD}),
        ("praise", {"chosen": GOOD}),
        ("like", {"chosen": GOOD, "more": 1}),
        ("like", {"chosen": {"role": "user", "content": "x"}}),
    ):
        assert send(served, kind, **given) == 400, (kind, given)
    assert send(served, "like", id="../../etc", chosen=GOOD) == 400
    assert send(served, "like", chosen={**GOOD, "content": "x" * (1 << 20)}) == 413
    assert rows(folder, SFT) == []
    monkeypatch.setattr(feedback_module, "_MOST_FILE_BYTES", 1 << 19)
    assert send(served, "like", chosen=GOOD) == 503


def test_feedback_is_on_for_this_machine_only_unless_a_folder_is_named(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    on, named = feedback_folder(None, True), feedback_folder(str(tmp_path / "here"), False)
    assert on is not None and on.folder == tmp_path / "feedback" and named is not None
    assert feedback_folder(None, False) is None and feedback_folder("off", True) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--feedback off"):
        feedback_folder(str(tmp_path / "file" / "inner"), True)
    with serving(ThreadEngine(load_model(str(tiny.base), "cpu"))) as served:
        assert served.get("/v1/feedback").json() == {"enabled": False}
        assert send(served, "like", chosen=GOOD) == 404


def test_a_folder_that_cannot_be_written_is_a_503(served: Served, folder: Path) -> None:
    (folder / SFT).mkdir()
    assert send(served, "like", chosen=GOOD) == 503
