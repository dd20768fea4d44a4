"""Output in any encoding, and help without arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sojourn.cli.main import main
from sojourn.run.output import LossyStream

ENCODINGS = ["gbk", "cp1252", "cp437", "ascii", "utf-8"]


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command whose streams have a strict encoding."""
    streams = {name: Path(name).open("w", encoding=encoding, errors="strict") for name in ("stdout", "stderr")}  # noqa: SIM115
    with monkeypatch.context() as patch:
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        patch.setattr(sys, "argv", ["sojourn", *args])
        with pytest.raises(SystemExit) as left:
            main()
        for stream in streams.values():
            stream.close()
    out, err = (Path(name).read_text(encoding=encoding) for name in streams)
    return int(left.value.code or 0), out, err


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_prints_in_every_encoding(encoding: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("presets list", "presets show small", "plan small", "plan medium --explain", "train --help",
                    "plan --help", "config check small"):  # fmt: skip
        code, out, _ = printed(monkeypatch, encoding, *command.split())
        assert code == 0 and len(out) > 50, command
        assert encoding == "utf-8" or "\\x" not in out, (command, out)
    code, _, err = printed(monkeypatch, encoding, "config", "check", "数据×→.yaml")
    assert code == 2 and err.startswith("sojourn: ")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_is_the_same_in_every_encoding(encoding: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("文.jsonl").write_text('{"text": "文字 café — 🙂 ×"}\n' * 3, encoding="utf-8")
    words = ["data.sources=文.jsonl", "data.vocab_size=400", "data.eval_fraction=0", "--json"]
    code, out, _ = printed(monkeypatch, encoding, "prepare", "smoke", *words)
    assert code == 0 and "文字 café — 🙂 ×" in json.loads(out)["examples"][0]["text"]
    code, out, _ = printed(monkeypatch, encoding, "presets", "list", "--json")
    assert any("×" in row["summary"] for row in json.loads(out))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_run_prints_in_every_encoding(encoding: str, home: Path) -> None:
    with Path("log").open("w", encoding=encoding, errors="strict") as stream:
        LossyStream(stream, "test").write("“step 1” · 512×6 → … 文 🙂\n")
    shown = Path("log").read_text(encoding=encoding)
    assert "step 1" in shown and "512" in shown
    assert encoding != "ascii" or shown == '"step 1" - 512x6 -> ... \\u6587 \\U0001f642\n'


@pytest.mark.parametrize("args", [(), ("presets",), ("bench",)])
def test_a_command_without_arguments_shows_its_help(
    args: tuple[str, ...], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = printed(monkeypatch, "utf-8", *args)
    assert code == 0 and "Usage: sojourn" in out and err == ""
