"""`sojourn bench train --gpus`: real ranks, an evenly shared batch, and no speed-up without the same losses."""

import json

import pytest
from typer.testing import CliRunner

from conftest import called
from sojourn.bench.train import scaling as measuring
from sojourn.bench.train.scaling import ENGINES, compare_with_single, format_row, make_scaling
from sojourn.bench.train.workload_files import WorkloadFiles, run_settings
from sojourn.bench.train.workloads import WORKLOADS
from sojourn.cli.bench import bench_app
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.storage.files import write_json

GIB = 2**30


def scaling(workloads: str = "tiny", row: str = "", gpus: str = "0,1", engines: str = "ddp,fsdp") -> measuring.Scaling:
    return make_scaling([workloads], row, 4, None, gpus, engines)


@pytest.mark.slow
def test_two_real_ranks_are_compared_with_a_single_process(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.Scaling, "counts", [2])  # one process of an engine starts like one alone
    out = tmp_path / "result.json"
    done = CliRunner().invoke(
        bench_app,
        ["train", "--workload", "tiny", "--gpus", "0,1", "--engines", "ddp", "--steps", "3",
         "--folder", str(tmp_path), "--out", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["gpus_used"] == [0, 1] and result["settings"] == "fused" and result["versions"]["torch"]
    (tiny,) = result["workloads"]
    rows = {row["name"]: row for row in tiny["rows"]}
    assert tiny["global_batch"] == 8 and list(rows) == ["single-1", "ddp-2"]
    for row in rows.values():
        assert list(row["losses"]) == ["1", "2", "3"], row.get("log")
        assert row["same"] and row["difference"] <= 1e-4 and row["gradient_difference"] <= 1e-3
        assert row["tokens_per_second"] > 0 and row["peak_memory"] > 2**20
        assert row["gain"] == row["tokens_per_second"] / rows["single-1"]["tokens_per_second"]
        assert row["efficiency"] == row["gain"] / row["ranks"]
    assert format_row(rows["ddp-2"]) in done.output.splitlines()
    left = {path.name for path in tmp_path.iterdir()}
    assert not any(name.startswith("tmp-") for name in left) and not (tmp_path / "home" / "runs").exists()


@pytest.mark.parametrize(
    ("gpus", "counts"), [("3", [1]), ("0,1", [1, 2]), ("0,1,2", [1, 2, 3]), ("0,1,2,3,4,5", [1, 2, 4, 6])]
)
def test_ranks_double_until_every_gpu_has_one(gpus, counts):
    found = scaling(gpus=gpus)
    assert found.counts == counts
    names = [one.name for one in found.bench_rows(WORKLOADS["tiny"])]
    assert names == ["single-1", *(f"{engine}-{count}" for engine in ("ddp", "fsdp") for count in counts)]


def test_all_is_one_rank_without_a_gpu():
    found = scaling(gpus="all")
    assert found.bench.device != "cpu" or found.gpus == (0,)


def test_the_global_batch_is_divisible_by_every_number_of_ranks():
    three, eight = scaling(gpus="0,1,2"), scaling(gpus="0,1,2,3,4,5,6,7")
    assert three.round_up(WORKLOADS["tiny"]).rows == 12
    assert eight.round_up(WORKLOADS["tiny"]) == WORKLOADS["tiny"]
    assert eight.round_up(WORKLOADS["lora-7b"]).rows == 8


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_row_is_a_valid_run(name, tmp_path):
    found = scaling(name, gpus="0,1", engines=",".join(ENGINES))
    workload = found.round_up(WORKLOADS[name])
    run = tmp_path / "run.yaml"
    write_json(run, run_settings(WorkloadFiles(workload, tmp_path, tmp_path), 4, 1, "cpu"))
    for one in found.bench_rows(workload):
        config = load_run([str(run), *(f"{key}={value}" for key, value in one.settings.items())]).config
        engine, _, count = one.name.partition("-")
        assert config.parallel.engine == engine and config.parallel.gpus == list(range(int(count)))
        assert config.train.global_batch == workload.rows and config.parallel.restarts == 0


def _row(ranks: int, losses: list[float], speed: float) -> dict:
    return {
        "engine": "ddp", "ranks": ranks, "settings": {"train.precision": "fp32"}, "first_grad_norm": 1.0,
        "losses": {str(step): loss for step, loss in enumerate(losses, 1)}, "tokens_per_second": speed,
        "peak_memory": 4 * GIB,
    }  # fmt: skip


def test_speed_up_and_efficiency_are_of_the_same_computation_only():
    single, good, wrong = _row(1, [7.0, 6.9], 100.0), _row(4, [7.0, 6.9], 300.0), _row(4, [7.0, 6.8], 390.0)
    for row in (single, good, wrong):
        compare_with_single(row, single, on_cpu=False)
    assert (single["gain"], single["efficiency"], good["gain"], good["efficiency"]) == (1.0, 1.0, 3.0, 0.75)
    assert format_row(good).split() == ["ddp", "4", "300", "3.00", "75", "%", "4.00", "0.0e+00"]
    assert (
        wrong["gain"] is None
        and wrong["efficiency"] is None
        and "differs" in format_row(wrong)
        and "%" not in format_row(wrong)
    )


def test_memory_is_per_rank():
    single, row = _row(1, [7.0], 100.0), _row(4, [7.0], 100.0)
    compare_with_single(row, single, on_cpu=True)
    assert row["peak_memory"] == GIB


def test_a_failure_is_a_row_and_nothing_is_compared_with_it():
    failed = {"engine": "single", "ranks": 1, "settings": {}, "note": "out of memory"}
    row = _row(2, [7.0], 100.0)
    for one in (failed, row):
        compare_with_single(one, failed, on_cpu=False)
    assert format_row(failed).split() == ["single", "1", "out", "of", "memory"]
    assert "gain" not in row and format_row(row).endswith("not compared: single failed")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engines": "dpp"}, "--engines: “dpp”: no such engine; did you mean ddp?; there are: ddp, fsdp, deepspeed"),
        ({"gpus": "0,x"}, "--gpus: “0,x” given; allowed: numbers such as 0,1, or all"),
        ({"gpus": "auto"}, "--gpus: “auto” given; allowed: numbers such as 0,1, or all"),
        ({"gpus": "1,1"}, "--gpus: 1,1 given; name each GPU once"),
        ({"row": "transformers"}, "--rows: “transformers”: no such row; there are: "),
    ],
    ids=["engine", "word", "auto", "twice", "a peer"],
)
def test_a_mistake_is_one_line(wrong, message):
    with pytest.raises(UserError) as error:
        scaling(**wrong)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_gpu_is_an_error_before_the_work(monkeypatch):
    monkeypatch.setattr(measuring, "_gpu_count", lambda device: 2)
    assert scaling(gpus="1,0").gpus == (1, 0) and scaling(gpus="all").gpus == (0, 1)
    with pytest.raises(UserError, match="there is no GPU 2; this machine has 2, counted from 0"):
        scaling(gpus="0,2")


def test_engines_need_gpus():
    done = called("bench", "train", "--engines", "ddp")
    assert done.returncode == 2 and "--gpus 0,1" in done.stderr and "Traceback" not in done.stderr
