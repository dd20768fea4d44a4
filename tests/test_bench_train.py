"""`sojourn bench train`: all rows do the same work, differences are reported, and a failure is only a row."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.peers.harness import padded

from conftest import called
from fork_server import ForkServer
from sojourn.bench import peers, process_memory
from sojourn.bench.train import measure as measuring
from sojourn.bench.train.bench_row import OURS, REFERENCE, BenchRow
from sojourn.bench.train.compare import best_against_peer, compare, format_row
from sojourn.bench.train.measure import failure_reason, make_bench, measure
from sojourn.bench.train.rows import bench_rows
from sojourn.bench.train.workload_files import WorkloadFiles, files_folder, run_settings
from sojourn.bench.train.workloads import WORKLOADS, default_workloads
from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.storage.files import write_json

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where weights and rows are kept from one test to the next."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(autouse=True)
def forked_rows(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are forks of a process that has torch imported."""
    names = SimpleNamespace(Popen=fork_server.popen, STDOUT=STDOUT, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(process_memory, "subprocess", names)


@pytest.fixture(scope="module")
def rows(folder: Path, fork_server: ForkServer) -> dict[str, dict]:
    """The command on the tiny model: four steps of ours and of plain transformers."""
    out = folder / "result.json"
    done = fork_server.run(
        "bench", "train", "--workload", "tiny", "--steps", "4", "--rows", f"fp32,{REFERENCE}",
        "--folder", str(folder), "--json", "--out", str(out), fork_children=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["versions"]["torch"] and result["cpu"] and result["date"] and "bench train" in result["command"]
    (tiny,) = result["workloads"]
    assert tiny["workload"] == "tiny"
    return {row["name"]: row for row in tiny["rows"]}


def test_the_same_steps_give_everyone_the_same_losses(rows):
    assert list(rows) == [REFERENCE, "fp32"]
    for row in rows.values():
        assert list(row["losses"]) == ["1", "2", "3", "4"], row.get("log")
        assert row["same"] and row["difference"] <= 1e-4 and row["gradient_difference"] <= 1e-3
        assert row["tokens_per_second"] > 0 and row["peak_memory"] > 2**20 and row["seconds_to_first_step"] > 0
    losses = rows[REFERENCE]["losses"]
    assert losses["4"] < losses["1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload, record",
    [
        ("tiny", {"text": "Rain fell on the hills all night, and the river rose by a hand. " * 40}),
        ("tiny-lora", {"instruction": "Say how the river is.", "output": "It has risen by a hand. " * 20}),
    ],
    ids=["texts", "chats"],
)
def test_own_data_is_what_all_read(tmp_path, workload, record):
    """Fewer than the steps need, so they are read several times; what is known is kept after every row."""
    own, out, kept = tmp_path / "own.jsonl", tmp_path / "out.json", []
    own.write_text(f"{json.dumps(record)}\n" * 50, encoding="utf-8")

    def echo(line: str) -> None:
        kept.append(len(json.loads(out.read_text(encoding="utf-8"))["workloads"][0]["rows"]) if out.is_file() else 0)

    plan = make_bench([workload], f"fp32,{REFERENCE}", 4, True, tmp_path, data=str(own), out=out)
    rows = measure(plan, echo)["workloads"][0]["rows"]
    assert [row["same"] for row in rows] == [True, True], rows
    assert rows[0]["losses"]["4"] < rows[0]["losses"]["1"] and 1 in kept and kept[-1] == 2
    (data,) = tmp_path.glob("*/data.jsonl")
    written = data.read_text(encoding="utf-8")
    assert written.count("river") >= 50 and ("messages" if workload == "tiny-lora" else "text") in written
    own.write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert files_folder(WORKLOADS[workload], 4, tmp_path, str(own)) != data.parent


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", r"--data: .*nothing: no such file or folder"),
        ("words.txt", r"--data: .*: no chats in it, but tiny-lora trains on chats"),
    ],
)
def test_data_that_cannot_be_read_is_an_error(tmp_path, name, message):
    (tmp_path / "words.txt").write_text("Nobody speaks here.\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        measure(make_bench(["tiny-lora"], "fp32", 4, True, tmp_path, data=str(tmp_path / name)), lambda line: None)


@pytest.mark.slow
def test_a_different_model_is_compared_in_speed_alone_and_peers_may_run_fewer_steps(rows, folder, monkeypatch):
    plain, gpt = BenchRow("plain", "a Llama", "plain"), BenchRow("nanogpt", "a GPT-2", "nanogpt", different_model=True)
    monkeypatch.setattr(measuring, "bench_rows", lambda workload, device: [gpt, plain])
    lines: list[str] = []
    made = measure(make_bench(["tiny"], "", 4, True, folder, 2), lines.append)["workloads"][0]["rows"]
    assert [list(row["losses"]) for row in made] == [["1", "2"], ["1", "2"]], made
    another, reference = made
    assert reference["note"] == "the reference" and reference["same"]
    assert "same" not in another and another["losses"]["2"] > 0
    compare(another, reference, "fp32")
    assert another["gain"] > 0 and "a different model" in format_row(another)
    compare(reference, rows[REFERENCE], "fp32")
    assert reference["same"] and reference["difference"] <= 1e-4 and reference["gradient_difference"] <= 1e-3


def test_a_different_computation_is_reported_and_a_crash_is_only_a_row(rows, folder, monkeypatch):
    dead = BenchRow("dead", "one that dies", "nobody")
    careless = BenchRow("careless", "one that looks across documents", "plain", {"whole_rows": True})
    absent = BenchRow("absent", "one that is not here", "plain", needs=("no_such_module",))
    monkeypatch.setattr(measuring, "bench_rows", lambda workload, device: [dead, careless, absent])
    lines: list[str] = []
    result = measure(make_bench(["tiny"], "", 4, True, folder), lines.append)
    died, differing, missing = result["workloads"][0]["rows"]
    assert died["note"] == "failed: KeyError: 'nobody'" and "Traceback" in died["log"]
    assert missing["note"] == "no_such_module is not installed"
    assert any(text.startswith("one that dies") and "failed" in text for text in lines)
    compare(differing, rows[REFERENCE], "fp32")
    assert not differing["same"] and differing["gain"] is None and "differs" in format_row(differing)
    assert best_against_peer([rows["fp32"], differing]) is None


def _row(name: str, losses: list[float | None], speed: float = 100.0, gradient: float = 1.0) -> dict:
    return {
        "name": name, "title": name, "runner": OURS if name == "ours" else name, "first_grad_norm": gradient,
        "losses": {str(step): loss for step, loss in enumerate(losses, 1)}, "tokens_per_second": speed,
        "peak_memory": GIB,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "same"),
    [
        (_row("ours", [7.0, 6.99]), True),
        (_row("ours", [7.0, 6.9]), False),
        (_row("ours", [7.0, None]), False),
        (_row("ours", [7.0, float("nan")]), False),
        (_row("ours", [7.0, 6.99], gradient=1.01), False),
        (_row("ours", []), False),
    ],
    ids=["equal", "another loss", "no loss", "not a number", "another gradient", "no step in common"],
)
def test_only_the_same_computation_counts(row, same):
    reference = _row(REFERENCE, [7.0, 6.99], speed=50.0)
    compare(row, reference, "fp32")
    assert row["same"] is same and row["gain"] == (2.0 if same else None)
    json.dumps(row, allow_nan=False) if same else format_row(row)


def test_the_noise_of_bf16_is_allowed_and_counts_in_the_mean_after_twenty_steps():
    reference = _row(REFERENCE, [5.0] * 40)
    noisy = _row("ours", [5.05] * 20 + [5.0] * 19 + [6.0], gradient=1.02)
    compare(noisy, reference, "bf16")
    assert noisy["same"] and noisy["difference"] == pytest.approx(0.01)
    assert noisy["curve_difference"] == pytest.approx(0.01)
    compare(noisy, reference, "fp32")
    assert not noisy["same"]
    drifting = _row("ours", [5.0] * 20 + [5.2] * 20)
    compare(drifting, reference, "bf16")
    assert not drifting["same"] and "later losses by 4.0e-02 in the mean" in drifting["note"]


def test_our_best_row_is_compared_with_the_best_peer():
    rows = [_row("slow", [7.0], 10.0), _row("fast", [7.0], 50.0), _row("ours", [7.0], 100.0)]
    for row in rows:
        compare(row, rows[0], "fp32")
    assert best_against_peer(rows)["message"] == "ours is 2.00 times as fast as fast, in 1.00 of its memory"


def test_each_row_of_ours_changes_one_setting():
    for workload in WORKLOADS.values():
        for device in ("cpu", "cuda"):
            listed = bench_rows(workload, device)
            assert listed[0].name == REFERENCE and len({one.name for one in listed}) == len(listed)
            ours = [one for one in listed if one.runner == OURS]
            aside = [(before, after) for before, after in pairwise(ours) if after.name == "hopper"]
            assert ours and len(aside) == (device == "cuda" and not workload.has_adapters)
            for before, after in [*pairwise(one for one in ours if one.name != "hopper"), *aside]:
                changed = [key for key in after.settings if after.settings[key] != before.settings[key]]
                assert len(changed) == (2 if after.name == "offload" else 1), (workload.name, after.name)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_row_of_ours_is_a_valid_run(name, tmp_path):
    workload = WORKLOADS[name]
    run = tmp_path / "run.yaml"
    write_json(run, run_settings(WorkloadFiles(workload, tmp_path, tmp_path), 25, 5, "cuda"))
    for row in (one for one in bench_rows(workload, "cuda") if one.runner == OURS):
        config = load_run([str(run), *(f"{key}={value}" for key, value in row.settings.items())]).config
        assert config.train.steps == 25 and config.method.kind == workload.method


def test_a_machine_measures_what_it_has_room_for():
    assert [one.name for one in default_workloads(None)] == ["tiny"]
    assert [one.name for one in default_workloads(8 * GIB)] == ["tiny"]
    assert [one.name for one in default_workloads(16 * GIB)] == ["qlora-7b"]
    assert {"pretrain-110m", "pretrain-875m", "full-1.5b", "lora-7b", "full-7b"} < {
        one.name for one in default_workloads(139 * GIB)
    }


def test_an_installed_package_measures_our_rows_alone(monkeypatch):
    monkeypatch.setattr(peers, "__file__", "/somewhere/lib/python3/site-packages/sojourn/bench/peers.py")
    for workload in WORKLOADS.values():
        assert {row.runner for row in bench_rows(workload, "cuda")} == {OURS}
    assert not make_bench(["tiny"], "", 4, None, None).peers
    with pytest.raises(UserError, match="--peers: the scripts of other programs are in the repository"):
        make_bench(["tiny"], "", 4, True, None)


def test_shapes_are_as_large_as_their_names_say():
    sizes = {name: WORKLOADS[name].shape.parameters / 1e6 for name in ("pretrain-110m", "pretrain-875m", "full-1.5b")}
    assert {name: round(size, -1) for name, size in sizes.items()} == {
        "pretrain-110m": 110, "pretrain-875m": 880, "full-1.5b": 1540,
    }  # fmt: skip
    assert WORKLOADS["lora-7b"].shape.parameters == pytest.approx(7.6e9, rel=0.01)


def test_steps_are_logged_often_enough_and_the_first_fifth_warms_up():
    plan = replace(make_bench(["tiny"], "", 25, True, None))
    assert plan.log_every == 5 and plan.logged_steps == [1, 5, 10, 15, 20, 25]
    assert replace(plan, steps=4).logged_steps == [1, 2, 3, 4]
    assert replace(plan, steps=12).logged_steps == [1, 2, 4, 6, 8, 10, 12]


def test_padded_documents_are_those_of_the_packed_rows():
    ids = np.arange(1, 17).reshape(2, 8)
    documents = np.array([[0, 0, 0, 1, 1, -1, -1, -1], [0, 0, 1, 1, 1, 1, 2, 2]])
    labels = np.where(documents == 1, ids + 1, -100)
    batch = Batch(ids, labels, ids, documents)
    parts = list(padded(batch, 2))
    assert [part["ids"].shape for part in parts] == [(2, 3), (2, 4), (1, 2)]
    assert sum(int(part["mask"].sum()) for part in parts) == batch.real_tokens
    assert sum(int((part["labels"] >= 0).sum()) for part in parts) == batch.targets
    assert parts[1]["ids"].tolist() == [[9, 10, 0, 0], [11, 12, 13, 14]]


def test_a_failure_has_a_one_line_reason():
    assert failure_reason("Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried…\nfoot", 1) == "out of memory"
    assert failure_reason("one\nRunFailed: no room\n", 1) == "failed: RunFailed: no room"
    assert failure_reason("", -11) == "killed by signal 11"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ["tinny"]}, "--workload: “tinny”: no such workload; did you mean tiny?; there are: tiny,"),
        ({"rows": "chunkd"}, "--rows: “chunkd”: no such row; did you mean chunked?; there are: "),
        ({"rows": REFERENCE, "peers": False}, "--rows: names only peers, but --no-peers leaves them out"),
        ({"folder": Path("nowhere")}, "--folder: nowhere: no such folder"),
        ({"overrides": ["train.lr=1e-3"]}, "train.lr=1e-3: applies to our own rows alone; add --no-peers"),
        ({"overrides": ["train.compile=on"], "peers": False}, "train.compile=on: allowed: KEY=VALUE, with"),
        ({"overrides": ["train.lr"], "peers": False}, "train.lr: allowed: KEY=VALUE, with a KEY of train.lr, "),
        ({"overrides": ["train.lr=fast"], "peers": False}, "train.lr: “fast” given; allowed: "),
    ],
    ids=["workload", "row", "no row left", "folder", "with peers", "not for rows", "no value", "bad value"],
)
def test_a_mistake_is_one_line(options, message):
    with pytest.raises(UserError) as error:
        make_bench(**{"workloads": ["tiny"], "rows": "", "steps": 4, "peers": True, "folder": None, **options})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_our_own_rows_take_overrides(folder):
    def losses(*overrides):
        plan = make_bench(["tiny"], "fp32", 10, False, folder, overrides=overrides)
        (row,) = measure(plan, lambda _: None)["workloads"][0]["rows"]
        assert "losses" in row, row
        return row["losses"]

    plain, warmed = losses(), losses("train.schedule=cosine", "train.warmup=5", "log.every_steps=1")
    assert list(plain) == ["1", *(str(step) for step in range(2, 11, 2))]
    assert list(warmed) == [str(step) for step in range(1, 11)]
    assert warmed["1"] == plain["1"] and warmed["10"] > plain["10"], "it has learned less, having warmed up"


def test_too_small_a_disk_is_an_error_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.shutil, "disk_usage", lambda path: SimpleNamespace(free=20e9))
    with pytest.raises(UserError, match=r"20\.0 GB are free, 22\.3 GB are needed"):
        make_bench(["lora-7b,qlora-7b,full-7b", "full-1.5b", "pretrain-875m"], "", 25, True, tmp_path)
    make_bench(["lora-7b,qlora-7b,full-7b"], "", 25, True, tmp_path)  # these share their weights


def test_a_result_that_cannot_be_written_is_an_error_before_the_work():
    done = called("bench", "train", "--out", "nowhere/a.json")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip().endswith("--out: nowhere: no such folder")


def test_the_notes_of_a_run_are_printed_below_its_row(folder, monkeypatch):
    """Such as that a row with CUDA graphs could not capture them."""
    real = measuring._run_ours

    def noted(plan, contender, run, work, log):
        found = real(plan, contender, run, work, log)
        log.write_text(log.read_text(encoding="utf-8") + "note: it was otherwise\n", encoding="utf-8")
        return found

    monkeypatch.setattr(measuring, "_run_ours", noted)
    lines: list[str] = []
    result = measure(make_bench(["tiny"], "fp32", 4, True, folder), lines.append)
    (row,) = result["workloads"][0]["rows"]
    assert row["notes"] == ["note: it was otherwise"] and "  note: it was otherwise" in lines


def test_the_loss_curves_are_drawn_from_the_measured_losses():
    from benchmarks import curves

    root = Path(__file__).parents[1] / "benchmarks"

    assert curves.draw() == (root / "results/curves-H200-2026-11-17.svg").read_text(encoding="utf-8")
