"""What more GPUs bring: the same run in real processes, shared evenly, and no speed-up without the same losses."""

import json

import pytest
from typer.testing import CliRunner

from conftest import sojourn
from sojourn.bench.train import scaling as measuring
from sojourn.bench.train.ground import Ground, settings
from sojourn.bench.train.scaling import ENGINES, judge, line, make_scaling
from sojourn.bench.train.workloads import WORKLOADS
from sojourn.cli.bench import bench_app
from sojourn.config.load import load_run
from sojourn.errors import UserError
from sojourn.storage.files import write_json

GIB = 2**30


def asked(workloads: str = "tiny", row: str = "", gpus: str = "0,1", engines: str = "ddp,fsdp") -> measuring.Scaling:
    return make_scaling([workloads], row, 4, None, gpus, engines)


@pytest.mark.slow
def test_two_real_processes_are_told_against_one_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.Scaling, "counts", [2])  # one process of an engine starts like one alone
    out = tmp_path / "result.json"
    said = CliRunner().invoke(
        bench_app,
        ["train", "--workload", "tiny", "--gpus", "0,1", "--engines", "ddp", "--steps", "3",
         "--folder", str(tmp_path), "--out", str(out)],
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["gpus_used"] == [0, 1] and result["settings"] == "fused" and result["versions"]["torch"]
    (tiny,) = result["workloads"]
    rows = {row["name"]: row for row in tiny["rows"]}
    assert tiny["rows_to_a_step"] == 8 and list(rows) == ["single-1", "ddp-2"]
    for row in rows.values():
        assert list(row["losses"]) == ["1", "2", "3"], row.get("said")
        assert row["same"] and row["difference"] <= 1e-4 and row["gradient_difference"] <= 1e-3
        assert row["tokens_per_second"] > 0 and row["peak_memory"] > 2**20
        assert row["gain"] == row["tokens_per_second"] / rows["single-1"]["tokens_per_second"]
        assert row["efficiency"] == row["gain"] / row["processes"]
    assert line(rows["ddp-2"]) in said.output.splitlines()
    left = {path.name for path in tmp_path.iterdir()}
    assert not any(name.startswith("tmp-") for name in left) and not (tmp_path / "home" / "runs").exists()


@pytest.mark.parametrize(
    ("gpus", "counts"), [("3", [1]), ("0,1", [1, 2]), ("0,1,2", [1, 2, 3]), ("0,1,2,3,4,5", [1, 2, 4, 6])]
)
def test_processes_double_until_every_gpu_has_one(gpus, counts):
    found = asked(gpus=gpus)
    assert found.counts == counts
    names = [one.name for one in found.contenders(WORKLOADS["tiny"])]
    assert names == ["single-1", *(f"{engine}-{count}" for engine in ("ddp", "fsdp") for count in counts)]


def test_all_is_one_process_where_there_is_no_gpu():
    found = asked(gpus="all")
    assert found.plan.device != "cpu" or found.gpus == (0,)


def test_a_step_has_rows_for_every_process_and_the_same_number_for_each():
    three, eight = asked(gpus="0,1,2"), asked(gpus="0,1,2,3,4,5,6,7")
    assert three.workload(WORKLOADS["tiny"]).rows == 12
    assert eight.workload(WORKLOADS["tiny"]) == WORKLOADS["tiny"]
    assert eight.workload(WORKLOADS["lora-7b"]).rows == 8


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_row_is_a_run_that_can_be_typed(name, tmp_path):
    found = asked(name, gpus="0,1", engines=",".join(ENGINES))
    workload = found.workload(WORKLOADS[name])
    run = tmp_path / "run.yaml"
    write_json(run, settings(Ground(workload, tmp_path, tmp_path), 4, 1, "cpu"))
    for one in found.contenders(workload):
        config = load_run([str(run), *(f"{key}={value}" for key, value in one.settings.items())]).config
        engine, _, count = one.name.partition("-")
        assert config.parallel.engine == engine and config.parallel.gpus == list(range(int(count)))
        assert config.train.global_batch == workload.rows and config.parallel.restarts == 0


def _row(processes: int, losses: list[float], speed: float) -> dict:
    return {
        "engine": "ddp", "processes": processes, "told": {"train.precision": "fp32"}, "first_gradient": 1.0,
        "losses": {str(step): loss for step, loss in enumerate(losses, 1)}, "tokens_per_second": speed,
        "peak_memory": 4 * GIB,
    }  # fmt: skip


def test_speed_up_and_efficiency_are_of_the_same_computation_only():
    alone, good, wrong = _row(1, [7.0, 6.9], 100.0), _row(4, [7.0, 6.9], 300.0), _row(4, [7.0, 6.8], 390.0)
    for row in (alone, good, wrong):
        judge(row, alone, on_cpu=False)
    assert (alone["gain"], alone["efficiency"], good["gain"], good["efficiency"]) == (1.0, 1.0, 3.0, 0.75)
    assert line(good).split() == ["ddp", "4", "300", "3.00", "75", "%", "4.00", "0.0e+00"]
    assert wrong["gain"] is None and wrong["efficiency"] is None and "differs" in line(wrong) and "%" not in line(wrong)


def test_memory_is_that_of_one_process():
    alone, row = _row(1, [7.0], 100.0), _row(4, [7.0], 100.0)
    judge(row, alone, on_cpu=True)
    assert row["peak_memory"] == GIB


def test_what_fails_is_only_a_row_and_nothing_is_told_against_a_failure():
    failed = {"engine": "single", "processes": 1, "told": {}, "note": "out of memory"}
    row = _row(2, [7.0], 100.0)
    for one in (failed, row):
        judge(one, failed, on_cpu=False)
    assert line(failed).split() == ["single", "1", "out", "of", "memory"]
    assert "gain" not in row and line(row).endswith("not compared: single failed")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"engines": "dpp"}, "--engines: “dpp”: no such engine; did you mean ddp?; there are: ddp, fsdp, deepspeed"),
        ({"gpus": "0,x"}, "--gpus: “0,x” given; allowed: numbers such as 0,1, or all"),
        ({"gpus": "auto"}, "--gpus: “auto” given; allowed: numbers such as 0,1, or all"),
        ({"gpus": "1,1"}, "--gpus: 1,1 given; name each GPU once"),
        ({"row": "transformers"}, "--rows: “transformers”: no such row; there are: "),
    ],
    ids=["engine", "word", "auto", "twice", "a peer"],
)
def test_a_mistake_is_one_line(wrong, told):
    with pytest.raises(UserError) as error:
        asked(**wrong)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_told_before_the_work(monkeypatch):
    monkeypatch.setattr(measuring, "_there", lambda device: 2)
    assert asked(gpus="1,0").gpus == (1, 0) and asked(gpus="all").gpus == (0, 1)
    with pytest.raises(UserError, match="there is no GPU 2; this machine has 2, counted from 0"):
        asked(gpus="0,2")


def test_engines_without_gpus_are_refused():
    said = sojourn("bench", "train", "--engines", "ddp")
    assert said.returncode == 2 and "--gpus 0,1" in said.stderr and "Traceback" not in said.stderr
