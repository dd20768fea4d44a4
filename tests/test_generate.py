"""`sojourn generate` over files of prompts: every row once, whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import called
from mounts import mounted_tmpfs
from sojourn.infer.completions_file import CompletionsFile

ASK = [f"What colour is the {thing} of house {number}?" for number, thing in enumerate(("cat", "boat", "lamp") * 3)]


@pytest.fixture(scope="module")
def model(tiny) -> str:
    return str(tiny.base)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "id": at % 4}) + "\n" for at, text in enumerate(ASK)))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def generate(model: str, *given: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    said = called("generate", model, "--max-tokens", "6", *map(str, given))
    assert said.returncode == code, said.stderr
    assert code == 0 or said.stderr.count("\n") == 1, said.stderr
    return said


def test_a_file_of_prompts_becomes_a_file_of_completions(model: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    said = generate(model, "--prompts", prompts, "-o", out)
    rows = read(out)
    assert [(row["prompt"], row["id"]) for row in rows] == [(text, at % 4) for at, text in enumerate(ASK)]
    assert all({"completion", "finish_reason", "prompt_tokens", "tokens"} < row.keys() for row in rows)
    assert "tok/s" in said.stderr and said.stdout == ""
    printed = generate(model, "--prompts", prompts, "--batch-size", 2).stdout
    assert [json.loads(line) for line in printed.splitlines()] == rows
    alone = json.loads(generate(model, "-p", ASK[4], "--json").stdout)
    assert alone == [{key: value for key, value in rows[4].items() if key != "id"}]


def test_the_same_command_again_has_nothing_to_do_and_other_settings_are_refused(
    model: str, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("--prompts", prompts, "-o", out, "--temperature", 0.8, "--seed", 4)
    generate(model, *command)
    before = out.read_bytes()
    assert "complete already" in generate(model, *command).stderr and out.read_bytes() == before
    for changed, name in ((("--seed", 5), "seed 4, not 5"), (("--top-k", 3), "top_k 0, not 3"), (("--raw",), "raw")):
        assert name in generate(model, *command, *changed, code=2).stderr
    assert out.read_bytes() == before
    generate(model, *command, "--seed", 5, "--overwrite")
    assert out.read_bytes() != before
    prompts.write_text(prompts.read_text().replace("cat", "dog"))
    assert "started with prompts" in generate(model, *command, "--seed", 5, code=2).stderr


KILL = """
from sojourn.storage import disk
calls, real = [0], {name: getattr(disk, name) for name in ("write", "sync", "rename")}
def wrapped(name):
    def call(*given):
        calls[0] += 1
        if calls[0] == AT and name == "write":
            given[0].write(bytes(given[1])[: len(given[1]) // 2])
        if calls[0] == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*given)
    return call
for name in real:
    setattr(disk, name, wrapped(name))
"""


def test_kills_at_any_moment_lose_and_double_no_row(model: str, prompts: Path, tmp_path: Path, fork_server) -> None:
    """Killed again and again in the middle of its writes; several completions a prompt, drawn without a seed."""
    out = tmp_path / "out.jsonl"
    command = ("generate", model, "--max-tokens", "3", "--prompts", str(prompts), "-o", str(out), "--temperature", "1")
    command = (*command, "-n", "2", "--batch-size", "3")
    codes = [fork_server.run(*command, preamble=KILL.replace("AT", str(at))).returncode for at in (2, 4, 8, 99)]
    assert codes == [-signal.SIGKILL] * 3 + [0]
    settings = json.loads((tmp_path / ".out.jsonl.settings.json").read_text())
    whole = tmp_path / "whole.jsonl"
    again = ("generate", model, "--max-tokens", "3", "--prompts", str(prompts), "-o", str(whole), "--temperature", "1")
    assert called(*again, "-n", "2", "--seed", str(settings["seed"])).returncode == 0
    assert out.read_bytes() == whole.read_bytes()
    assert [(row["prompt"], row["sample"]) for row in read(out)] == [(text, at) for text in ASK for at in (0, 1)]


def open_out(path: Path, total: int = 9, overwrite: bool = False, **changed: object) -> CompletionsFile:
    return CompletionsFile(path, {"model": "a", "seed": 1, **changed}, total, overwrite, lambda: 77)


def test_whatever_bytes_a_kill_leaves_whole_rows_stay_and_the_rest_is_made_again(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", [{"completion": "两行\n" * at, "at": at} for at in range(9)]
    file = open_out(out)
    file.append(rows[:4])
    file.append(rows[4:])
    file.close()
    whole = out.read_bytes()
    for cut in range(len(whole) + 1):
        out.write_bytes(whole[:cut])
        file = open_out(out)
        file.append(rows[file.done :])
        file.close()
        assert out.read_bytes() == whole


def test_two_processes_never_write_the_same_file(model: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    file = open_out(out)
    said = generate(model, "--prompts", prompts, "-o", out, code=2)
    assert "another process is writing it" in said.stderr
    file.close()
    generate(model, "--prompts", prompts, "-o", out)


def test_a_seed_is_drawn_once_and_again_for_a_new_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    file = open_out(out, seed=None)
    file.append([{"a": 1}])
    file.close()
    assert file.settings["seed"] == 77
    drawn = CompletionsFile(out, {"model": "a", "seed": None}, 9, False, lambda: 78)
    drawn.close()
    assert drawn.settings["seed"] == 77 and drawn.done == 1
    anew = CompletionsFile(out, {"model": "a", "seed": None}, 1, True, lambda: 79)  # complete: --overwrite begins anew
    anew.close()
    assert anew.settings["seed"] == 79 and anew.done == 0 and out.read_bytes() == b""


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(model: str, prompts: Path, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "size=40k") as folder:
        out, filling = folder / "out.jsonl", folder / "filling"
        filling.write_bytes(b"x" * (32 << 10))
        command = ["generate", model, "--max-tokens", "12", "-n", "8", "--temperature", "1", "--batch-size", "2"]
        command += ["--prompts", str(prompts), "-o", str(out)]
        said = called(*command)
        assert said.returncode == 1 and "No space left on device; free some space" in said.stderr
        assert "run the same command to go on" in said.stderr
        assert 0 < out.read_bytes().count(b"\n") < 72
        filling.unlink()
        assert called(*command).returncode == 0 and len(read(out)) == 72


def test_what_is_there_already_is_never_touched(model: str, prompts: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    assert "it is there already" in generate(model, "--prompts", prompts, "-o", foreign, code=2).stderr
    assert "is the file of prompts" in generate(model, "--prompts", prompts, "-o", prompts, code=2).stderr
    assert "no such folder" in generate(model, "--prompts", prompts, "-o", tmp_path / "no" / "out", code=2).stderr
    assert "folder" in generate(model, "--prompts", prompts, "-o", tmp_path, code=2).stderr
    assert "not an ordinary file" in generate(model, "--prompts", prompts, "-o", "/dev/null", code=2).stderr
    assert foreign.read_text() == "mine" and len(read(prompts)) == 9


def test_lines_of_a_text_file_in_any_shape(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\r\n  \r\n二 two\r\nthree".encode())
    rows = [json.loads(line) for line in generate(model, "--prompts", path).stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "二 two", "three"]
    path.write_bytes(b"fine\n\xff\xfe broken\n")
    assert f"{path}:2: not UTF-8" in generate(model, "--prompts", path, code=2).stderr
    path.write_bytes(b"")
    said = generate(model, "--prompts", path, "-o", tmp_path / "none.jsonl")
    assert "complete already (0 completions)" in said.stderr and (tmp_path / "none.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', "expected a column prompt or messages, found question"),
        ('{"prompt": ""}', "it is empty"),
        ('{"prompt": 5}', "found a number"),
        ('{"messages": []}', "expected a list of messages, found none"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "nothing to answer",
        ),
        ('{"prompt": "a"', "not valid JSON"),
        ("[1, 2]", "expected a record"),
        ('{"prompt": "\\ud800"}', "half a character"),
    ],
)
def test_a_record_without_a_prompt_is_one_line_before_anything_is_generated(
    model: str, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    said = generate(model, "--prompts", path, "-o", tmp_path / "out.jsonl", code=2)
    assert message in said.stderr and f"{path}:2" in said.stderr and not (tmp_path / "out.jsonl").exists()


def test_chats_system_messages_and_columns_of_ours(model: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "It?"},
    ]
    records = [
        {"messages": turns, "completion": "the reference", "tokens": 3},
        {"prompt": "It?", "system": "Be brief."},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "It?"}]},
        {"prompt": "Hi " * 200},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    said = generate(model, "--prompts", path)
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    assert rows[0]["input_completion"] == "the reference" and rows[0]["input_tokens"] == 3
    assert rows[0]["messages"] == turns and rows[0]["completion"] != "the reference"
    assert rows[1]["completion"] == rows[2]["completion"] and rows[1]["prompt_tokens"] == rows[2]["prompt_tokens"]
    assert rows[3]["finish_reason"] == "error" and "the model's context is 128" in rows[3]["error"]
    assert "1 prompts have no completion" in said.stderr
    raw = generate(model, "--prompts", path, "--raw")
    assert "--raw takes text alone" in json.loads(raw.stdout.splitlines()[0])["error"]
    path.write_text('{"prompt": "a", "tokens": 1, "input_tokens": 2}\n')
    assert "would become one" in generate(model, "--prompts", path, code=2).stderr


def test_a_model_without_pad_eos_or_template_generates(tiny, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "bare"
    shutil.copytree(tiny.base, folder)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        if (folder / name).exists():
            facts = json.loads((folder / name).read_text())
            facts = {
                key: value for key, value in facts.items() if not key.startswith(("pad_", "eos_", "chat_", "extra_"))
            }
            facts.pop("additional_special_tokens", None)
            (folder / name).write_text(json.dumps(facts))
    rows = json.loads(generate(str(folder), "-p", "What colour", "-p", "It", "--json").stdout)
    assert [row["finish_reason"] for row in rows] == ["length", "length"] and rows[0]["tokens"] == 6
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "no chat template" in generate(str(folder), "--prompts", path).stdout


def test_wrong_settings_are_one_line_before_the_model_is_opened() -> None:
    for given, message in (
        (("-p", "a", "--top-p", "0"), "top_p is 0"),
        (("-p", "a", "--logit-bias", "x=1"), "expected TOKEN_ID=BIAS"),
        (("-p", "a", "--prompts", "b"), "either --prompt TEXT"),
        ((), "either --prompt TEXT"),
        (("--prompts", "nowhere.jsonl"), "--prompts: nowhere.jsonl: no such file"),
        (("-p", "a", "-n", "2"), "set a temperature"),
    ):
        said = called("generate", "no-such-model", *given)
        assert said.returncode == 2 and message in said.stderr and said.stderr.count("\n") == 1
