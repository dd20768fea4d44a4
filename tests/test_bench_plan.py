"""The benchmark of plans: real steps in clean processes, failures that are only rows, and arithmetic one can trust."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.planner.case_files import settings_of
from benchmarks.planner.cases import CASES, METHODS, TINY, chosen, held_out, shape_of
from benchmarks.planner.measure import _row as _row_of
from benchmarks.planner.measure import _task, finished, make_plan, to_run
from benchmarks.planner.peers import COUNTS, ask_peers
from benchmarks.planner.replan import planned
from benchmarks.planner.report import errors, line, lines, summary

from fork_server import ForkServer
from sojourn.catalog.gpus import find_gpu
from sojourn.config.load import dump
from sojourn.errors import UserError
from sojourn.resolve.device_spec import catalog_device

GIB = 2**30
ROOT = Path(__file__).parents[1]


def _python(*args):
    """A Python that finds benchmarks/, wherever it is started."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, env=environment)


def _planner(*args):
    return _python("-m", "benchmarks.planner", *args)


_MODULE = (
    f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\nrunpy.run_module('benchmarks.planner', run_name='__main__')"
)


@pytest.fixture(scope="module")
def ran(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict]]:
    """The command on a CPU: of one case the base is damaged, and one has been measured before."""
    folder = tmp_path_factory.mktemp("plan")
    base = folder / "bases/tiny-qwen3/model.safetensors"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"no weights")
    done = _row(next(case for case in TINY if case.name == "tiny-whole"), measured={"loss": 1, "step_seconds": 1.5})
    before, out = folder / "before.json", folder / "result.json"
    before.write_text(json.dumps({"rows": [done]}), encoding="utf-8")
    words = ("--folder", str(folder), "--resume", str(before), "--out", str(out), "--no-peers", "--json")
    said = fork_server.run(*words, code=_MODULE)
    assert said.returncode == 0 and "4 cases measured, 1 failed, 0 not run" in said.stderr, said.stderr
    result = json.loads(said.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8")) and result["versions"]["torch"]
    return folder, {row["name"]: row for row in result["rows"]}


@pytest.mark.slow
def test_a_case_that_fails_is_a_row_with_its_reason_and_the_others_go_on(ran):
    rows = {name: row["measured"] for name, row in ran[1].items()}
    assert rows["tiny-qwen3"]["failed"].startswith("model.base: ") and "\n" not in rows["tiny-qwen3"]["failed"]
    assert list(rows) == [case.name for case in TINY]
    assert all("step_seconds" in row for name, row in rows.items() if name != "tiny-qwen3")


@pytest.mark.slow
def test_what_has_been_measured_is_not_measured_again(ran):
    assert ran[1]["tiny-whole"]["measured"] == {"loss": 1, "step_seconds": 1.5}


@pytest.mark.slow
def test_every_case_makes_real_steps_on_random_weights_that_take_no_disk(ran):
    folder, rows = ran
    tokens = {"tiny-pretrain": 128, "tiny-full": 64, "tiny-lora": 256}
    for name, count in tokens.items():
        found = rows[name]["measured"]
        assert found["step_seconds"] > 0 and 2 <= len(found["steps"]) <= 30 and found["tokens"] == count
        assert found["cpu_us"] > 0
        assert found["loss"] == pytest.approx(math.log(300), rel=0.05)
        assert abs(found["loss"] - math.log(300)) > 1e-6  # as weights of zero would have it
    assert rows["tiny-full"]["measured"]["parameters"] == rows["tiny-full"]["planned"]["kinds"]["weights"] // 4
    assert rows["tiny-full"]["document"] is None and 10 < rows["tiny-lora"]["document"] < 25
    assert str(folder) not in json.dumps(rows)
    weights = folder / "bases/tiny-qwen2/model.safetensors"
    assert weights.stat().st_blocks * 512 < weights.stat().st_size / 4


@pytest.mark.slow
def test_each_case_is_one_process(ran):
    folder, rows = ran
    runs = Counter(path.name.rsplit("-", 1)[0] for path in (folder / "home/runs").iterdir())
    assert runs == Counter(name for name in rows if name != "tiny-whole")
    assert all(row["measured"]["quiet"] > 0 for name, row in rows.items() if name not in ("tiny-whole", "tiny-qwen3"))


def test_only_what_lacks_an_answer_is_run_the_largest_first(result):
    rows = deepcopy(result["rows"])
    for row in rows:
        row["planned"] = planned(row)
    assert to_run(rows, True) == []  # running out of memory under the cap is an answer
    del rows[1]["capped"], rows[20]["measured"]
    rows[30]["measured"] = {"failed": "took longer than 9 s"}
    found = to_run(rows, True)
    assert {row["name"] for row in found} == {rows[n]["name"] for n in (1, 20, 30)}
    assert found == sorted(found, key=lambda row: -row["planned"]["device"])
    assert {row["name"] for row in to_run(rows, False)} == {rows[n]["name"] for n in (20, 30)}


def test_the_cases_span_what_people_train_and_fit_an_h200_by_plan():
    assert len(CASES) >= 64 and len({case.name for case in CASES}) == len(CASES)
    sizes = [shape_of(case).parameters for case in CASES]
    assert min(sizes) < 12e6 and max(sizes) > 8e9
    spans = {"length": (512, 16_384), "rows": (1, 32)}
    assert {key: (min(got), max(got)) for key in spans if (got := [getattr(case, key) for case in CASES])} == spans
    assert {shape_of(case).family for case in CASES} == {"llama", "qwen2", "qwen3", "mistral"}
    assert {case.checkpointing for case in CASES} == {"off", "selective", "full"}
    assert 0.4 < sum(case.compiled for case in CASES) / len(CASES) < 0.6
    room = 0.97 * find_gpu("H200").plan_gib * GIB
    assert all(planned(_row(case))["device"] < room for case in CASES)


def test_the_held_out_half_is_half_of_each_method_and_never_changes():
    halves = Counter((case.method, case.name in held_out()) for case in CASES)
    assert all(halves[method, True] == halves[method, False] for method in METHODS)
    compiled = sum(case.compiled for case in CASES if case.name in held_out())
    assert abs(compiled - len(CASES) / 4) <= 3
    names = "\n".join(sorted(held_out() & {case.name for case in CASES}))
    assert hashlib.sha256(names.encode()).hexdigest()[:12] == "24422e5ee830"


def _row(case, **measured):
    row = {
        "name": case.name, "held_out": case.name in held_out(), "case": asdict(case),
        "config": dump(settings_of(case, "cuda", Path("somewhere"))), "shape": asdict(shape_of(case)),
        "document": case.document, "gpu": "NVIDIA H200",
        "place": {"device": "cuda", "capability": [9, 0], "precision": "bf16"},
    }  # fmt: skip
    return {**json.loads(json.dumps(row)), **measured}


@pytest.fixture(scope="module")
def result() -> dict:
    """As if every peak were four fifths of the plan, and one twice the plan; half of the time planned too short."""
    rows = [_row(case) for case in CASES]
    for number, row in enumerate(rows):
        plan = planned(row)
        peak = plan["allocated"] * (2 if row["name"] == "lora-7b" else 0.8)
        seconds = plan["step_seconds"] * (2 if number % 2 else 1)
        row["measured"] = {"allocated": peak, "device": plan["device"], "step_seconds": seconds}
        row["capped"] = {"cap": 1} | ({"failed": "…", "out_of_memory": True} if row["name"] == "lora-7b" else {})
        row["planned"] = {"allocated": 1, "device": 1, "enough": 1, "context": 0, "moment": "", "step_seconds": 1.0}
    return {"rows": rows}


def test_first_steps_have_the_memory_of_the_smallest_card_that_is_said_to_be_enough(tmp_path):
    case = next(case for case in CASES if case.name == "pretrain-875m")
    row = _row(case)
    row["planned"] = plan = planned(row)
    cap = _task(row, settings_of(case, "cuda", tmp_path), tmp_path, tmp_path, cap=True).cap
    config = settings_of(case, "cuda", tmp_path)
    for share, fits in ((1.001, True), (0.999, False)):
        card = replace(find_gpu("H200"), usable_gib=share * (cap + plan["context"]) / GIB)
        assert (plan["device"] <= catalog_device(config, card).memory_budget) is fits


def test_errors_are_shares_of_what_was_measured():
    rows = [{"name": str(n), "measured": {"allocated": 1000}} for n in range(1, 101)]
    found = errors(rows, "allocated", {str(n): 1000 + (n if n % 2 else -n) for n in range(1, 101)})
    assert found["mean"] == pytest.approx(0.0505) and found["p95"] == pytest.approx(0.095)
    assert found["worst"] == pytest.approx(-0.1) and found["worst_case"] == "100" and found["cases"] == 100
    assert errors(rows, "device", {}) is None


def test_reading_plans_anew_and_tells_both_halves_apart(result, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result), encoding="utf-8")
    code = (
        "import json, sys; from pathlib import Path\n"
        "from benchmarks.planner.measure import read_again\n"
        "found = read_again(Path(sys.argv[1]), False, lambda text: print(text, file=sys.stderr))\n"
        "assert 'torch' not in sys.modules\nprint(json.dumps(found['report']))"
    )
    said = _python("-c", code, str(file))
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    held, other = report["sojourn, held out"], report["sojourn, the other half"]
    assert held["allocated"]["cases"] + other["allocated"]["cases"] == len(CASES)
    assert held["allocated"]["p95"] == pytest.approx(0.25) == other["allocated"]["p95"]
    mine = other if "lora-7b" not in held_out() else held
    assert mine["allocated"]["worst_case"] == "lora-7b" and mine["allocated"]["worst"] == pytest.approx(-0.5)
    assert mine["false_fits"] == 1 and mine["above_need"] == 1 and mine["capped"] == len(CASES) // 2
    assert held["device"]["mean"] == 0 and 0.2 < held["step_seconds"]["mean"] < 0.3
    assert "1 of 33 ran out of memory where the plan says that they fit" in said.stderr
    assert said.stderr.startswith("pretrain-11m  ") and "+25.0%" in said.stderr
    assert "method qlora" in said.stderr and "furthest off in memory:" in said.stderr


def test_peers_answer_what_they_count_and_their_answers_stay(result):
    pytest.importorskip("accelerate")
    rows = [
        deepcopy(row) for row in result["rows"] if row["name"] in ("pretrain-875m", "pretrain-201m-long", "lora-135m")
    ]
    told = ask_peers(rows, {"fitcheck": "0.3.1"})
    count = shape_of(chosen(["pretrain-201m-long"], 1, "cuda")[0]).parameters
    answers = {row["name"]: row["peers"] for row in rows}
    assert answers["pretrain-201m-long"]["accelerate, float32"] == pytest.approx(16 * count, rel=0.001)
    assert not any(key.startswith("accelerate") for key in answers["lora-135m"])
    assert told["fitcheck"] == "0.3.1" and told["accelerate, float32"]
    for row in rows:
        row["planned"] = planned(row)
    found = {"rows": rows, "peers": told}
    found["report"] = summary(found)
    assert any(text.startswith("accelerate, float32, ") for text in lines(found))
    assert any(text.startswith("fitcheck counts everything") for text in lines(found))


def test_lines_say_what_was_planned_what_failed_and_where_time_went(result):
    row = deepcopy(next(row for row in result["rows"] if row["name"] == "lora-1.7b-selective"))
    row["planned"] = planned(row)
    times = {"opened": 11.1, "first_seconds": 22.22, "quiet": 13.33}
    row["measured"] |= {**times, "allocated": 1.25 * row["planned"]["allocated"]}
    assert "-20.0%" in line(row) and "cap ok  11.1 + 22.2 + 13.3 s" in line(row) and len(line(row)) < 150
    row["capped"] = {"failed": "CUDA out of memory", "out_of_memory": True}
    assert "cap OOM" in line(row)
    assert finished({"rows": [row]}, False, lambda text: None)["report"]["sojourn, held out"]["false_fits"] <= 1
    row["measured"] = {"failed": "CUDA out of memory" * 20, "out_of_memory": True}
    assert "RAN OUT OF MEMORY: CUDA out of memory" in line(row) and len(line(row)) < 150


def test_the_report_fits_a_screen(result):
    rows = deepcopy(result["rows"])
    for number, row in enumerate(rows):
        row["planned"] = planned(row)
        row["peers"] = dict.fromkeys(COUNTS, row["planned"]["device"])
        if number > 50:
            row["measured"] = {"failed": "…"}
    found = {"rows": rows, "peers": dict.fromkeys(COUNTS, "1.0")}
    found["report"] = summary(found)
    assert len(lines(found)) <= 75


def _plan(**given):
    asked = {"words": [], "limit": None, "jobs": 1, "seconds": 9.0, "within": None, "capped": True, "peers": False}
    return make_plan(**asked | {"folder": None, "out": None, "resume": None} | given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"words": ["lora-900b"]}, "--cases: “lora-900b”: no such case"),
        ({"folder": Path("nowhere")}, "--folder: nowhere: no such folder"),
        ({"resume": Path("nothing.json")}, "--resume: nothing.json: no such file"),
        ({"resume": Path("bad.json")}, "--resume: bad.json: not a result of python -m benchmarks.planner --out FILE"),
    ],
)
def test_what_is_wrong_is_one_line(home, given, says):
    (home / "bad.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError) as told:
        _plan(**given)
    assert str(told.value).startswith(says) and "\n" not in str(told.value)


def test_reading_and_measuring_are_not_asked_for_together(home):
    said = _planner("--read", "some.json", "--limit", "1")
    assert said.returncode == 2 and len(said.stderr.strip().splitlines()) == 1
    assert "--read: measures nothing; remove --resume, --cases, --limit and --draw" in said.stderr


def test_drawing_and_choosing_are_not_asked_for_together(home):
    said = _planner("--draw", "3", "--limit", "1")
    assert said.returncode == 2 and said.stderr.strip().endswith("remove --cases and --limit, or --draw")


@pytest.mark.parametrize(
    ("gib", "count"), [(139, 16), (24, 16), *(pytest.param(gib, 40, marks=pytest.mark.slow) for gib in (139, 24))]
)
def test_drawn_runs_are_the_same_for_a_seed_fit_the_card_and_are_held_out(monkeypatch, gib, count):
    card = SimpleNamespace(name="NVIDIA H200", capability=(9, 0), memory_bytes=gib * GIB)
    monkeypatch.setattr("sojourn.machine.gpus.driver_gpus", lambda: [card])
    plan = _plan(draw=count, seed=3)
    assert plan.cases == _plan(draw=count, seed=3).cases and plan.cases != _plan(draw=count, seed=4).cases
    rows = [_row_of(plan, case, dump(settings_of(case, "cuda", Path()))) for case in plan.cases]
    assert all(row["held_out"] and row["planned"]["device"] < card.memory_bytes for row in rows)
    assert {case.method for case in plan.cases} == set(METHODS) and len({case.name for case in plan.cases}) == count


def test_cases_are_found_by_name_and_by_part():
    assert [case.name for case in chosen(["lora-7b"], None, "cuda")] == ["lora-7b"]
    assert len(chosen(["qlora-7b"], None, "cuda")) == 1 and len(chosen([], 5, "cuda")) == 5
    assert len(chosen(["qlora-"], None, "cuda")) == 26 and len(chosen([], None, "cuda")) == 66
    thin, played = (chosen([word], None, "cuda") for word in ("thin", "played"))
    assert {case.length for case in (*thin, *played)} == {128}
    assert {case.graphs for case in thin} == {"off"} and {case.graphs for case in played} == {"on"}
    with pytest.raises(UserError, match="did you mean lora-135m"):
        chosen(["lora-13m"], None, "cuda")
