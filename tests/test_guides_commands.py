"""docs/guides-commands.md is true: each line is understood as typed, and runs, or is refused as it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fork_server import ForkServer, needs_fork
from sojourn.config.keys import all_keys
from sojourn.config.load import load_run, read_config
from sojourn.config.other_trainers import ACCUMULATION_FLAGS, BATCH_SIZE_FLAGS, SWITCH_FLAGS, VALUE_FLAGS
from sojourn.config.schema import RunConfig
from sojourn.run.home import run_folder
from sojourn.storage.files import read_json_lines
from test_config_errors import sojourn
from test_hub import NEW, Hub, Repository, lines

PAGE = Path(__file__).parent.parent / "docs" / "guides-commands.md"
VERBS = ("doctor", "prepare", "train", "plan", "eval", "generate", "chat", "launch-line")


@dataclass(frozen=True)
class Row:
    """A line of a guide, what to type instead, and what the page says of it."""

    guide: str
    here: str
    says: str

    @property
    def words(self) -> list[str]:
        """What follows `sojourn VERB`."""
        command = self.here.removeprefix("nohup ").removeprefix("!")
        return shlex.split(re.sub(r" > \S+ 2>&1 &$", "", command))[2:]

    @property
    def verb(self) -> str:
        found = re.match(r"(?:nohup |!)?sojourn (\w+)", self.here)
        return found[1] if found else ""

    @property
    def works(self) -> bool:
        return self.says.startswith("**works**")


def tables() -> dict[str, list[list[str]]]:
    """The page's tables by the heading above them, each a list of rows of cells."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        found[section.splitlines()[0]] = [[c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return found


TABLES = tables()
SETTINGS, DEEPSPEED = TABLES.pop("Settings in Python"), TABLES.pop("ds_config.json")
ROWS = [Row(guide, here.strip("`"), says) for rows in TABLES.values() for guide, here, says in rows]
RUNS = list({row.here: row for row in ROWS if row.verb in ("train", "prepare")}.values())
TRAINED = [row for row in RUNS if row.verb == "train"]


def here(row: Row) -> str:
    return row.here


def value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return [source.path for source in found] if key.endswith("sources") else found


# --- the page ---


def test_the_page_covers_every_guide_and_says_what_works() -> None:
    assert len(TABLES) == 5 and len(ROWS) > 70 and len(TRAINED) > 30
    for row in ROWS:
        assert row.says.startswith(("**works**", "**planned**", "vLLM's own")), row


def test_every_verb_on_the_page_is_there_or_planned() -> None:
    for row in ROWS:
        assert row.verb in ("", *VERBS) or row.says.startswith("**planned**"), row
        assert row.verb != "" or not row.here.startswith("sojourn")


@pytest.mark.parametrize("row", [row for row in ROWS if ".py --" in row.guide and row.verb == "train"], ids=here)
def test_a_training_command_keeps_the_guides_flags(row: Row) -> None:
    (theirs,) = re.findall(r"`[^`]*\.py ([^`]*)`", row.guide)
    assert set(re.sub(r" > \S+ 2>&1 &$", "", theirs).split()) <= set(row.words)


# --- what each line means ---


@pytest.mark.parametrize("row", RUNS, ids=here)
def test_a_command_sets_what_it_says(row: Row, home: Path) -> None:
    config = load_run(row.words).config
    flags = re.findall(r"--([\w-]+)(?:[ =](?!--)(\S+))?", shlex.join(row.words))
    given = {name.replace("-", "_"): word for name, word in flags}
    for name, word in given.items():
        if name in VALUE_FLAGS:
            found = value(config, VALUE_FLAGS[name])
            found = ",".join(map(str, found)) if isinstance(found, list) else found
            assert str(found) == word or float(found) == float(word), (name, word, found)
        elif name in SWITCH_FLAGS:
            assert value(config, SWITCH_FLAGS[name][0]) == SWITCH_FLAGS[name][1]
        elif name in BATCH_SIZE_FLAGS:
            assert config.train.micro_batch == int(word)
    rows, times = (
        [int(given[name]) for name in names if name in given] for names in (BATCH_SIZE_FLAGS, ACCUMULATION_FLAGS)
    )
    if rows:
        gpus = config.parallel.gpus if isinstance(config.parallel.gpus, list) else [0]
        assert config.train.global_batch == rows[0] * (times or [1])[0] * len(gpus)
    if "--load_in_4bit" in row.words:
        assert (config.method.kind, config.method.bits) == ("qlora", 4)


def test_a_config_file_that_is_not_here_is_the_preset_of_its_name(home: Path) -> None:
    names = {word for row in RUNS for word in row.words if word.startswith("configs/")}
    assert {"configs/lora_20k.yaml", "configs/lora_50k.yaml", "configs/lora_100k.yaml", "configs/qlora.yaml"} == names
    for name in names:
        loaded = load_run(["--config", name])
        assert loaded.notes == (f"{name} does not exist; using the preset {loaded.config.name}",)


@pytest.mark.parametrize("cells", SETTINGS, ids=lambda cells: cells[2])
def test_a_setting_of_another_trainer_is_the_key_that_the_page_names(cells: list[str], home: Path) -> None:
    _, _, flag, key = cells
    loaded = load_run(["qlora-7b", *shlex.split(flag.strip("`"))])
    if not key.startswith("`"):
        assert loaded.config == load_run(["qlora-7b"]).config
        assert loaded.notes or "strategy" in flag
        return
    words = [word.replace(": ", "=") for word in re.findall(r"`([^`]+)`", key)]
    assert loaded.config == load_run(["qlora-7b", *words]).config


def test_the_deepspeed_files_fields_have_keys_that_exist() -> None:
    keys = [key for _, cell in DEEPSPEED for key in re.findall(r"`([a-z_0-9]+\.[a-z_0-9]+)`", cell)]
    assert len(keys) > 10 and {tuple(key.split(".")) for key in keys} <= set(all_keys())


# --- what each line does ---


def small(row: Row, chats: Path, base: Path) -> list[str]:
    """The same command at the size of a test, on a CPU."""
    loaded = load_run(row.words).config
    tiny = ["train.epochs=0.02", "data.max_length=64", "train.device=cpu", "train.precision=auto", "log.trackers=[]",
            "log.every_steps=1", "log.tensorboard=off", f"data.sources={chats}"]  # fmt: skip
    if loaded.data.tokenizer != "auto":
        tiny += [f"data.tokenizer={base}"]
    if loaded.data.eval_sources:
        tiny += [f"data.eval_sources={chats}"]
    if loaded.save.folder and loaded.save.folder.startswith("/"):
        tiny += ["save.folder=elsewhere"]
    if loaded.model.base:
        return [*row.words, *tiny, f"model.base={base}", "method.rank=4"]
    return [*row.words, *tiny, "model.d_model=64", "model.num_layers=1", "model.num_heads=2", "data.vocab_size=400"]


ALONE = [row for row in TRAINED if not any(word in row.here for word in ("0,1", "--deepspeed", "--resume"))]


WORKING = [row for row in ALONE if row.works]


def computation(row: Row) -> tuple[str, object, str]:
    """What a training on a CPU can tell apart: method, bits of the base, precision."""
    config = load_run(row.words).config
    bits = config.method.bits if config.method.kind == "qlora" else None
    return config.method.kind, bits, str(config.train.precision)


FIRST = {computation(row): row for row in reversed(WORKING)}


def flat(config: RunConfig) -> dict[str, object]:
    """Every setting by its key."""
    sections = config.model_dump(exclude={"name"})
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def named_keys(row: Row) -> set[str]:
    """The settings that the flags of a command set."""
    flags = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", shlex.join(row.words))}
    keys = {VALUE_FLAGS[name] for name in flags & set(VALUE_FLAGS)} | {
        SWITCH_FLAGS[name][0] for name in flags & set(SWITCH_FLAGS)
    }
    if flags & {*BATCH_SIZE_FLAGS, *ACCUMULATION_FLAGS}:
        keys |= {"train.micro_batch", "train.global_batch"}
    if "model.d_model" in keys:
        keys |= {"model.num_heads"}
    if "model.base" in keys:  # it brings sizes and a tokenizer of its own, and the method is chosen by --load_in_4bit
        keys |= {"model.d_model", "model.num_layers", "model.num_heads", "data.vocab_size", "method.kind"}
    return keys


@pytest.mark.parametrize("row", RUNS, ids=here)
def test_a_command_is_its_preset_with_nothing_changed_but_what_it_names(row: Row, home: Path) -> None:
    """So that one training per method and precision shows that all of them train; `make test-parallel` trains each."""
    named = re.search(r"--config (\S+)", row.here)
    preset = named[1] if named else row.words[0] if not row.words[0].startswith("-") else "small"
    ours, theirs = flat(load_run(row.words).config), flat(load_run([preset]).config)
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert differing <= named_keys(row), row.here


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.here, marks=[] if row is FIRST[computation(row)] else [pytest.mark.slow])
        for row in WORKING
    ],
)
def test_a_command_that_works_trains_and_leaves_a_model(row: Row, chats: Path, base: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = load_run(row.words).config
    gpus = ["parallel.gpus=auto"] if config.parallel.gpus != "auto" else []
    words = [*small(row, chats, base), *gpus]
    code, _, err = sojourn("train", *words)
    assert code == 0, err
    made = load_run(words).config
    final = run_folder(str(made.name), made.save.folder).final
    assert AutoTokenizer.from_pretrained(final) and AutoModelForCausalLM.from_pretrained(final)


DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}, "allgather_partitions": True,
        "allgather_bucket_size": 2e5, "reduce_scatter": True, "reduce_bucket_size": 2e5, "overlap_comm": False,
        "contiguous_gradients": True,
    },
    "fp16": {"enabled": False},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
}  # fmt: skip


def several() -> list[Any]:
    """Each way to spread a run once, over two processes at most; the others differ in nothing but numbers, and take
    their time."""
    rows = [row for row in TRAINED if ("0,1" in row.here or "--deepspeed" in row.here) and "--nnodes" not in row.here]
    seen: set[tuple[bool, ...]] = set()
    marked = []
    for row in sorted(rows, key=lambda row: len(row.here)):
        kind = tuple(word in row.here for word in ("--fsdp", "--deepspeed"))
        slow = kind in seen or "0,1,2" in row.here
        marked.append(pytest.param(row, id=row.here, marks=[pytest.mark.slow] if slow else []))
        seen.add(kind)
    return marked


@needs_fork
@pytest.mark.parametrize("row", several())
def test_a_command_for_several_gpus_trains_on_as_many_processes(
    row: Row, chats: Path, base: Path, fork_server: ForkServer
) -> None:
    """On a machine without GPUs they share its CPU."""
    if "--deepspeed" in row.here:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        Path("ds_config.json").write_text(json.dumps(DS_CONFIG))
    config = load_run(row.words).config
    said = fork_server.run("train", *small(row, chats, base), "train.precision=fp32", fork_children=True)
    assert said.returncode == 0, said.stderr
    run = run_folder(config.name or "run")
    (start,) = [event for event in read_json_lines(run.events) if event["kind"] == "start"]
    assert start["processes"] == (len(config.parallel.gpus) if isinstance(config.parallel.gpus, list) else 1)
    engine = "fsdp" if "--fsdp" in row.here else "deepspeed" if "--deepspeed" in row.here else "ddp"
    assert read_config(run.config).parallel.engine == engine and run.has_final()


def test_a_launchers_flag_names_the_gpus(home: Path) -> None:
    ours = load_run(["small", "--batch_size", "2", "--gpus", "0,1,2,3"]).config
    assert load_run(["small", "--batch_size", "2", "--nproc_per_node=4"]).config == ours


def test_a_checkpoint_is_found_by_the_name_other_trainers_give_it(words: list[str], home: Path) -> None:
    first = [*words, "--output_dir", "output/paper_r64", "train.steps=4", "save.every_steps=2", "save.keep=9"]
    assert sojourn("train", *first)[0] == 0
    assert sorted(p.name for p in Path("output/paper_r64/checkpoints").glob("s*")) == ["step-00000002", "step-00000004"]
    named = ["name=again", "train.steps=4", "--resume-from-checkpoint"]
    code, out, err = sojourn("train", *words, *named, "output/paper_r64/checkpoint-2")
    assert code == 0 and "resuming from step 2 (step-00000002)" in out, err
    code, _, err = sojourn("train", *words, *named, "output/paper_r64/checkpoint-3", "name=other")
    assert code == 2 and "checkpoint-3: not a complete checkpoint" in err


def test_preprocessing_is_found_again_by_the_training_that_follows(words: list[str], home: Path) -> None:
    (row,) = [row for row in RUNS if "--input_dir" in row.here]
    shutil.rmtree(home / "prepared")
    raw = home / "data" / "raw"
    raw.mkdir(parents=True)
    (home / "chats.jsonl").rename(raw / "chats.jsonl")
    sizes = ["data.vocab_size=400", "data.max_length=64"]
    code, out, err = sojourn("prepare", *row.words, *sizes)
    assert code == 0 and "as the model sees them" in out, err
    code, out, err = sojourn("train", "--input_dir", "data/raw", *words[2:])
    assert code == 0 and "already prepared" in out, err


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A hub that has WikiText-2, and the environment in which it is the hub."""
    card = "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n"
    files = {}
    for split in ("train", "validation"):
        card += f"  - {{split: {split}, path: {split}.jsonl}}\n"
        files[f"{split}.jsonl"] = lines(
            *(f" Robert {n} is an English film , television and theatre actor . \n" for n in range(300))
        )
    Hub.repositories = {
        "datasets/Salesforce/wikitext": Repository({NEW: {"README.md": f"{card}---\n".encode(), **files}})
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    yield {**kept, **settings, "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()
    server.server_close()


# What reads the hub's settings at import is imported anew.
_OTHER_HUB = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("huggingface_hub", "datasets")]:
    del sys.modules[name]
"""


@needs_fork
def test_wikitext2_is_read_from_the_hub_and_trained_on(
    home: Path, hub: dict[str, str], fork_server: ForkServer
) -> None:
    (row,) = [row for row in TRAINED if "--d_model 512" in row.here and "--max_seq_len 512" in row.here]
    tiny = [word for word in small(row, home, home) if not word.startswith("data.sources")]
    said = fork_server.run("train", *tiny, preamble=_OTHER_HUB, env=hub)
    assert said.returncode == 0, said.stderr
    (report,) = [json.loads(path.read_text()) for path in home.glob("prepared/*/report.json")]
    assert "Salesforce/wikitext" in report["sources"][0]["name"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no hanging up here")
def test_nohup_keeps_a_run_alive_when_the_line_hangs_up(words: list[str]) -> None:
    command = [sys.executable, "-m", "sojourn", "train", *words, "train.steps=60"]
    process = subprocess.Popen(["nohup", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = run_folder("t")
    while not run.read_metrics():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
