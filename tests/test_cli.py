"""The command line as a whole: verbs, exit codes, and what it does not import."""

import json
import os
import subprocess
import sys

import pytest

from conftest import called, sojourn
from sojourn.cli import main

VERBS = (
    "demo",
    "doctor",
    "plan",
    "prepare",
    "train",
    "eval",
    "generate",
    "chat",
    "rehearse",
    "verify-resume",
    "launch-line",
    "presets",
    "config",
    "bench",
)


def test_help_names_every_verb():
    said = sojourn("--help")
    assert said.returncode == 0
    assert all(f" {verb} " in said.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb):
    said = called(verb, "--help")
    assert said.returncode == 0 and "Usage" in said.stdout


_ON_A_LAPTOP = (
    "--help", "--version", "presets list", "presets show small", "config check small", "config check x", "train --help",
    "plan medium",
)  # fmt: skip
# A plan measures the run's data, which takes numpy.
_HEAVY = ("torch", "transformers", "numpy", "tokenizers", "datasets", "peft", "safetensors", "asyncssh", "httpx")


def test_the_laptop_side_imports_no_heavy_library(home):
    code = (
        "import sys\n"
        "from sojourn.cli.main import main\n"
        f"for line in {_ON_A_LAPTOP!r}:\n"
        "    sys.argv = ['sojourn', *line.split()]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert (end.code or 0) == (2 if line.endswith(' x') else 0), line\n"
        f"    heavy = set({_HEAVY!r}) & set(sys.modules) - ({{'numpy'}} if line.startswith('plan') else set())\n"
        "    assert not heavy, (line, heavy)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_users_mistake_is_one_line_and_exit_2(home):
    said = sojourn("train", "smal")
    assert said.returncode == 2 and said.stdout == ""
    assert said.stderr.splitlines() == [
        "sojourn: “smal” is neither a preset nor a file; did you mean small? (see: sojourn presets list)"
    ]


def test_a_folder_that_cannot_be_written_is_one_line(home):
    (home / "file").write_text("x")
    said = called("train", "smoke", "--output_dir", "file/run")
    assert said.returncode == 1 and said.stderr.splitlines() == [
        "sojourn: file/run: cannot be created: Not a directory; choose another folder: save.folder=FOLDER"
    ]


@pytest.mark.parametrize("verb", ["generate", "chat", "eval"])
def test_asking_a_run_that_is_not_there_says_what_to_do(home, verb):
    said = called(verb, "nobody", *(["--prompt", "x"] if verb == "generate" else []))
    assert said.returncode == 2 and len(said.stderr.splitlines()) == 1 and "train one first" in said.stderr


def test_plan_shows_memory_time_and_money_and_finds_a_gpu_by_any_spelling(home):
    said = called("plan", "medium", "--gpu", "rtx4090", "--json")
    assert said.returncode == 0, said.stderr
    plan = json.loads(said.stdout)
    assert plan["parameters"] == 23_468_544
    assert {offer["gpu"]["name"] for offer in plan["offers"]} == {"RTX 4090"}
    assert all(offer["cost"] > 0 and offer["largest_micro_batch"] == 16 for offer in plan["offers"])
    text = called("plan", "medium").stdout
    assert "cheapest that fits" in text and "¥" in text


def test_plan_says_no_where_a_model_does_not_fit(home):
    offers = json.loads(called("plan", "xxl", "model.num_layers=200", "--gpu", "T4", "--json").stdout)["offers"]
    assert offers[0]["micro_batch"] is None


def test_expandable_segments_are_the_default_and_a_users_own_setting_wins(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(main.sys, "platform", "linux")
    main.use_expandable_segments()
    assert {os.environ[name] for name in names} == {"expandable_segments:True"}
    monkeypatch.delenv(names[0])
    monkeypatch.setenv(names[1], "max_split_size_mb:128")
    main.use_expandable_segments()
    assert names[0] not in os.environ and os.environ[names[1]] == "max_split_size_mb:128"


@pytest.mark.parametrize(
    "line",
    [
        "chat ~nobody1/x", "plan lora-20k model.base=~nobody1/x", "runs show ~nobody1/x", "push ~nobody1/x a/b",
        "export ~nobody1/x --to hf", "eval ~nobody1/x", "generate ~nobody1/x --prompt hello", "serve ~nobody1/x",
        "prepare lora-20k --train_file ~nobody1/x.jsonl", "train small save.resume=~nobody1/x",
        "config check ~nobody1/x.yaml", "verify ~nobody1/x",
    ],
)  # fmt: skip
def test_the_home_of_a_user_that_there_is_not_is_a_path_like_any_other(line, home):
    said = called(*line.split())
    assert said.returncode == 2 and "nobody1" in said.stderr and "Traceback" not in said.stderr, said.stderr
