"""`sojourn chat`: turns, commands, Ctrl-C, several lines, any encoding, conversations that `prepare` reads."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from conftest import called
from sojourn.data.sources.document import Message
from sojourn.errors import UserError
from sojourn.infer.chat import Chat
from sojourn.infer.chat_terminal import ChatTerminal, accept_any_input, read_message
from sojourn.infer.generate import Generator
from sojourn.infer.load import load_model
from sojourn.infer.sampling import SamplingParams


@pytest.fixture(scope="module")
def generator(tiny) -> Generator:
    return Generator(load_model(str(tiny.base), "cpu"), 1)


def make_chat(generator: Generator, **params: object) -> Chat:
    return Chat(generator, SamplingParams(**{"max_tokens": 8, "seed": 1, **params}))


def say(chat: Chat, text: str) -> str:
    pieces: list[str] = []
    chat.say(text, pieces.append, lambda: False)
    return "".join(pieces)


def test_a_conversation_with_every_command(tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        "What colour is the cat?", "/temp 1.5", "/retry", "/system Be brief.", "And the boat?",
        f"/save {tmp_path}/c.jsonl", "/reset", "/save nothing.jsonl", "again", f"/save {tmp_path}/c.jsonl",
        f"/load {tmp_path}/c.jsonl 1", "/help",
        "/temp much", "/tamp", "/usr/bin/env is a path", "/exit", "never read",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    said = called("chat", str(tiny.base), "--max-tokens", "4", "--seed", "3")
    assert said.returncode == 0, said.stderr
    out = said.stdout
    for part in ("(temperature 1.5)", "(system message: Be brief.)", "(a new conversation)", "(nothing to save yet)",
                 "conversations in it: 2", "/reset              forget", "(/temp needs a number, such as 0.7)",
                 "no command /tamp; did you mean temp?"):  # fmt: skip
        assert part in out, (part, out)
    assert out.count("model: ") == 5 + 1  # five replies, and the one that /load shows
    saved = [json.loads(line)["messages"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert [turn["role"] for turn in saved[0]] == ["system", "user", "assistant", "user", "assistant"]
    assert len(saved) == 2


def test_what_is_saved_is_read_by_prepare_and_loaded_again(generator: Generator, tmp_path: Path) -> None:
    chat, path = make_chat(generator, temperature=1.0), tmp_path / "chats.jsonl"
    chat.system = "Be brief."
    say(chat, "What colour is the cat?\nAnd the 猫?")
    chat.save(path)
    say(chat, "And the boat?")
    chat.save(path)  # the same conversation, longer: its line is replaced
    chat.turns.append(Message("user", "unanswered"))
    other = make_chat(generator)
    say(other, "Hello")
    other.save(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2 and len(json.loads(lines[0])["messages"]) == 5
    said = called(
        "prepare", "smoke", "--train_file", str(path), "data.vocab_size=400", "data.eval_fraction=0", "--json"
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["train"]["documents"] == 2
    again = make_chat(generator)
    again.load(path, 1)
    assert (again.system, again.turns) == ("Be brief.", chat.turns[:-1])
    for wrong in ("no such file", "not a JSONL"):
        bad = tmp_path / "bad.py"
        if wrong == "not a JSONL":
            bad.write_text("import this\n")
            with pytest.raises(UserError, match=wrong):
                chat.save(bad)
            assert bad.read_text() == "import this\n"
        with pytest.raises(UserError, match=wrong):
            again.load(bad)


def test_a_reply_in_a_conversation_is_that_of_the_whole_prompt(generator: Generator) -> None:
    """The prefix cache has earlier turns, also after /retry, /system and /reset, and changes nothing."""
    chat = make_chat(generator)
    for text in ("What colour is the cat?", "And the boat of house 3?"):
        reply = say(chat, text)
        generator._engine.scheduler.pool.forget_all()
        fresh = make_chat(generator)
        fresh.turns = chat.turns[:-2]
        assert say(fresh, text) == reply
    scheduler = generator._engine.scheduler
    known = scheduler.prefix_tokens
    chat.retry(lambda piece: None, lambda: False)
    assert chat.turns[-1].content == reply and len(chat.turns) == 4
    assert scheduler.prefix_tokens - known >= 32
    chat.reset()
    assert say(chat, "What colour is the cat?") == say(make_chat(generator), "What colour is the cat?")


def test_another_try_draws_another_reply_and_a_seed_repeats_them(generator: Generator) -> None:
    def replies() -> list[str]:
        chat = make_chat(generator, temperature=1.5)
        found = [say(chat, "What colour is the cat?")]
        for _ in range(3):
            chat.retry(lambda piece: None, lambda: False)
            found.append(chat.turns[-1].content)
        return found

    assert len(set(replies())) > 2 and replies() == replies()


def test_ctrl_c_stops_the_reply_and_keeps_the_conversation(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(
        generator, max_tokens=60, temperature=1.0, logit_bias={generator.loaded.tokenizer.eos_token_id: -100.0}
    )
    terminal = ChatTerminal(chat)
    printed: list[str] = []

    def interrupt(piece: str) -> str:
        printed.append(piece)
        if len(printed) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return piece

    monkeypatch.setattr("sojourn.infer.chat_terminal.terminal_text", interrupt)
    before = signal.getsignal(signal.SIGINT)
    terminal._take("What colour is the cat?")
    assert signal.getsignal(signal.SIGINT) == before and "(stopped)" in capsys.readouterr().out
    assert 5 <= len(printed) < 20 and chat.turns[-1] == Message("assistant", "".join(printed))
    terminal._take("And the boat?")
    assert len(chat.turns) == 4


def test_a_conversation_that_outgrows_the_context_loses_its_oldest_turns(generator: Generator) -> None:
    chat = make_chat(generator)
    chat.system = "Be brief."
    long = "What colour is the cat of house 3? " * 2
    left_out = [chat.say(long, lambda piece: None, lambda: False).left_out for _ in range(6)]
    assert left_out[0] == 0 and left_out[-1] >= 2 and left_out == sorted(left_out)
    assert len(chat.turns) == 12  # what is saved is whole
    with pytest.raises(UserError, match=r"does not fit: it has .* context is 128"):
        chat.say("What colour is the cat? " * 60, lambda piece: None, lambda: False)
    assert len(chat.turns) == 12


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("one line\n", "one line"),
        ("two\\\nlines\n", "two\nlines"),
        ('"""\nfirst\n\n  second\n"""\n', "first\n\n  second"),
        ('"""one"""\n', "one"),
        ('"""one\ntwo"""\n', "one\ntwo"),
        ("\n", ""),
    ],
)
def test_messages_of_several_lines(typed: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert read_message() == message


@pytest.mark.parametrize(
    ("encoding", "typed", "message"),
    [
        ("utf-8", "猫\n".encode(), "猫"),
        ("gbk", "猫\n".encode("gbk"), "猫"),
        ("ascii", "猫\n".encode(), "猫"),  # a locale of C in a terminal of UTF-8
        ("utf-8", b"a \xff b\n", "a \ufffd b"),
        ("cp1252", "é\n".encode("cp1252"), "é"),
    ],
)
def test_input_in_any_encoding(encoding: str, typed: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding=encoding))
    accept_any_input()
    assert read_message() == message


def test_a_terminal_does_not_obey_what_a_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    from sojourn.run.output import terminal_text

    text = "fine\n\t猫 👩‍👧 \x1b[2J\x07\x9b31m\r"
    assert terminal_text(text) == text  # a file or a pipe gets it as it is
    monkeypatch.setattr(sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert terminal_text(text) == "fine\n\t猫 👩‍👧 \ufffd[2J\ufffd\ufffd31m\ufffd"
