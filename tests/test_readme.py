"""The README's own commands: each is run, or where it would train for long, checked as typed."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from conftest import called

README = Path(__file__).parent.parent / "README.md"
RUN_VERBS = ("train", "prepare", "rehearse", "verify-resume")


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("sojourn ")]


def test_the_readme_shows_every_verb_of_the_journey():
    verbs = {command.split()[1] for command in commands()}
    journey = {"doctor", "plan", "prepare", "rehearse", "train", "verify-resume", "eval", "generate", "chat"}
    assert journey | {"presets", "config"} <= verbs


def test_the_make_targets_of_the_readme_exist():
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("command", [c for c in commands() if c.split()[1] in RUN_VERBS])
def test_a_run_is_understood_as_the_readme_types_it(command, home):
    (home / "my.yaml").write_text("extends: small\n", encoding="utf-8")
    words = shlex.split(command)[2:]
    if "--fork" in words:  # of `train` alone
        del words[(at := words.index("--fork")) : at + 2]
    said = called("config", "check", *words)
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("command", [c for c in commands() if c.split()[1] == "plan"])
def test_plans_are_made_as_the_readme_types_them(command, home):
    said = called(*shlex.split(command)[1:])
    assert said.returncode == 0 and said.stdout, said.stderr


def test_the_readmes_commands_walk_the_whole_way(home, words, fork_server):
    """On data of a second instead of an hour: the same verbs, in the same order."""
    shutil.rmtree(home / "prepared")
    small = ["small", *words[1:-1], "name=small"]
    for arguments, expected in (
        (["prepare", *small], "the model will see"),
        (["rehearse", *small], "ready: sojourn train small"),
        (["train", *small], "next: sojourn chat small"),
        (["train", *small, "train.lr=1e-4", "--fork", "second"], "next: sojourn chat second"),
        (["eval", "small", "--tasks", "0"], "held-out loss"),
        (["generate", "small", "--prompt", "Hello", "--max-tokens", "4"], ""),
        (["presets", "copy", "small", "my.yaml"], "my.yaml written"),
        (["config", "check", "my.yaml"], "ok: my.yaml is a valid run"),
    ):
        said = (fork_server.run if arguments == ["train", *small] else called)(*arguments)
        assert said.returncode == 0, (arguments, said.stderr)
        assert expected in said.stdout
    typo = called("config", "check", "my.yaml", "trian.lr=1e-4")
    assert typo.returncode == 2 and "did you mean train?" in typo.stderr
