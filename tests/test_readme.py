"""The commands of README and the docs: each is run, or where it would train for long, checked as typed."""

import re
import shlex
import shutil
from itertools import zip_longest
from pathlib import Path

import pytest
import typer.main

from conftest import called
from sojourn.catalog.fused_families import FUSED_FAMILIES, FUSED_MIXTURES, LAYERS_LIKE_LLAMA

ROOT = Path(__file__).parent.parent
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [README, *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "guides-commands.md")]
RUN_VERBS = ("train", "prepare", "rehearse", "verify-resume")
OF_TRAIN_ALONE = ("--fork", "--nnodes", "--node_rank", "--master_addr")  # each with a value
FIGURE = re.compile(r"\d[\d,.]*\d|\d")


def commands() -> dict[str, str]:
    """Every `sojourn …` line of a bash block, with the page that has it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                command = line.split("  #")[0].strip()
                if command.startswith("sojourn "):
                    found.setdefault(command, page.name)
    return found


def with_verb(*verbs: str) -> list[str]:
    return [command for command in commands() if command.split()[1] in verbs]


def test_the_commands_cover_every_verb():
    verbs = {command.split()[1] for command in commands()}
    journey = {"doctor", "plan", "prepare", "rehearse", "train", "verify-resume", "eval", "generate", "chat"}
    assert journey | {"presets", "config", "bench"} <= verbs


def test_the_make_targets_of_the_pages_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in [*PAGES, CHINESE, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (page.name, target)


@pytest.mark.parametrize(
    "page", [*PAGES, CHINESE, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_files_that_the_pages_name_exist():
    for page in [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for path in re.findall(r"`([a-z_0-9]+/[\w/.-]+\.(?:py|toml))`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists() or (ROOT / "src/sojourn" / path).exists(), (page.name, path)


def test_the_architecture_lists_every_package_in_the_order_of_the_layers():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'^  "sojourn\.(\w+)",$', text, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == layers


@pytest.mark.parametrize("command", with_verb(*RUN_VERBS))
def test_a_run_is_understood_as_the_pages_type_it(command, home):
    (home / "my.yaml").write_text("extends: small\n", encoding="utf-8")
    args = shlex.split(command)[2:]
    for flag in OF_TRAIN_ALONE:
        if flag in args:
            del args[(at := args.index(flag)) : at + 2]
    args = ["my.yaml" if arg == "runs/my" else arg for arg in args if arg not in ("--verify", "--json")]
    done = called("config", "check", *args)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", with_verb("plan"))
def test_plans_are_made_as_the_pages_type_them(command, home):
    done = called(*shlex.split(command)[1:])
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("command", with_verb("bench"))
def test_benchmarks_have_the_options_that_the_pages_type(command):
    from sojourn.cli.bench import bench_app

    _, _, name, *args = shlex.split(command)
    group = typer.main.get_command(bench_app)
    group.commands[name].make_context(name, args)


def test_the_readmes_commands_walk_the_whole_way(home, words, fork_server):
    """On data of a second instead of an hour: the same verbs, in the same order."""
    shutil.rmtree(home / "prepared")
    small = ["small", *words[1:-1], "name=small"]
    for args, expected in (
        (["prepare", *small], "as the model sees them"),
        (["rehearse", *small], "ready: sojourn train small"),
        (["train", *small], "next: sojourn chat small"),
        (["train", *small, "train.lr=1e-4", "--fork", "second"], "next: sojourn chat second"),
        (["eval", "small", "--tasks", "0"], "held-out: loss"),
        (["generate", "small", "--prompt", "Hello", "--max-tokens", "4"], ""),
        (["presets", "copy", "small", "my.yaml"], "my.yaml written"),
        (["config", "check", "my.yaml"], "ok: my.yaml is a valid run"),
    ):
        done = (fork_server.run if args == ["train", *small] else called)(*args)
        assert done.returncode == 0, (args, done.stderr)
        assert expected in done.stdout
    typo = called("config", "check", "my.yaml", "trian.lr=1e-4")
    assert typo.returncode == 2 and "did you mean train?" in typo.stderr


def test_the_picture_of_a_plan_is_what_the_command_prints():
    from benchmarks import plan_picture

    assert plan_picture.PICTURE.read_text(encoding="utf-8") == plan_picture.draw(), (
        "the plan has changed: python benchmarks/plan_picture.py"
    )


def test_the_docs_list_every_attention_backend_in_order_of_preference():
    from sojourn.config.attention_backends import ATTENTION_BACKENDS

    selectable = [name for name, backend in ATTENTION_BACKENDS.items() if not backend.fused_qkv]
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = page.split("\n## Attention\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == selectable


def structure(page: Path) -> list[tuple[str, object]]:
    """What a translation must keep: headings, code without comments, rows of tables, list items, links and figures."""
    found: list[tuple[str, object]] = []
    in_code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            in_code = not in_code
            found.append(("fence", line))
        elif in_code:
            found.append(("code", line.split("  #")[0].rstrip()))
        elif line.startswith("#"):
            found.append(("heading", len(line) - len(line.lstrip("#"))))
        elif line.startswith("|"):
            found.append(("row", [sorted(FIGURE.findall(cell)) for cell in line.strip("|").split("|")]))
        elif line.startswith("- "):
            found.append(("item", None))
    return found


def test_the_chinese_readme_has_the_structure_links_and_figures_of_the_english_one():
    for english, chinese in zip_longest(structure(README), structure(CHINESE)):
        assert english == chinese

    def links(page: Path) -> list[str]:
        targets = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        return sorted(target for target in targets if not target.startswith("README"))

    def figures(page: Path) -> list[str]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        return sorted(
            figure for figure in FIGURE.findall(text) if any(mark in figure for mark in ".,") or len(figure) > 1
        )

    assert links(README) == links(CHINESE)
    assert figures(README) == figures(CHINESE)


@pytest.mark.parametrize(
    ("start", "families"),
    [
        ("| `advanced.fused_forwards` |", FUSED_FAMILIES | FUSED_MIXTURES),
        ("train all weights of ", LAYERS_LIKE_LLAMA),
    ],
)
def test_the_docs_name_every_family_with_fused_forwards(start, families):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith(start))
    named, prefixes = re.sub("[ -]", "", line).lower(), FUSED_FAMILIES | FUSED_MIXTURES
    assert not [family for family in families if prefixes[family].lower() not in named]
