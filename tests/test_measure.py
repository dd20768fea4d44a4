"""`sojourn doctor --measure`: what a device sustains, written as a row of the user's catalogue that plans then use."""

import json
from dataclasses import replace

import pytest

from conftest import called
from sojourn.catalog.gpus import find_gpu
from sojourn.catalog.models import find_model
from sojourn.catalog.tables import user_file
from sojourn.config.load import load_run
from sojourn.estimate.ceilings import link_rate
from sojourn.estimate.uncertainty import range_reason
from sojourn.estimate.workload import Workload
from sojourn.machine import measure as measuring
from sojourn.machine.gpus import DetectedGpu
from sojourn.machine.measure import Measurement, Size, catalogue_row, describe, measure, write_row
from sojourn.plan.offers import make_plan

SMALL = Size(seconds=0.02, scale=64)
RUN = ["lora-20k", "train.steps=100"]
VALUES = {"matmul_tflops": 66.0, "attention_tflops": 50.0, "copy_gbs": 640.0, "launch_us": 24.0, "disk_mbs": 900.0}


def _card(name="NVIDIA GeForce RTX 4080", gib=16.0, used=0):
    return DetectedGpu(0, name, int(gib * 2**30), used, (8, 9), "550", (12, 4), "torch")


def _found(**values):
    return Measurement("cuda", "RTX 4080", {**VALUES, **values}, {}, "sojourn doctor --measure, 2026-11-18, torch 2.11")


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "catalog.toml").write_text("# mine\n")
    return tmp_path


def test_every_part_is_measured_on_a_cpu(tmp_path):
    """The same code as on a GPU, with smaller tensors."""
    found = measure(tmp_path, [], SMALL)
    assert found.device == "cpu" and not found.failed and set(found.values) == set(VALUES)
    assert all(value > 0 for value in found.values.values())
    assert 0.5 < found.values["launch_us"] < 2000 and not list(tmp_path.iterdir())


def test_what_fails_does_not_hide_the_rest(tmp_path, monkeypatch):
    def broken(device, size):
        raise RuntimeError("CUDA out of memory\nmore")

    monkeypatch.setattr(measuring, "attention_tflops", broken)
    found = measure(tmp_path, [], SMALL)
    assert found.failed == {"attention_tflops": "CUDA out of memory"} and "matmul_tflops" in found.values
    assert "attention: not measured: CUDA out of memory" in describe(found, [], None)


def test_a_measured_row_changes_plans_for_that_card_only(own):
    config = load_run(RUN).config

    def planned(name):
        return make_plan(config, [find_gpu(name)]).offers[0]

    before, other = planned("RTX 4080"), planned("RTX 4090")
    path, name = write_row(_found(), _card())
    assert (path, name) == (user_file(), "RTX 4080") and path.read_text().startswith("# mine")
    card = find_gpu("RTX 4080")
    assert (
        card.rates == "measured" and card.matmul_tflops == 66.0 and card.memory_gib == 16 and card.bf16_tflops == 97.5
    )
    after = planned("RTX 4080")
    assert after.step.step_seconds > 1.2 * before.step.step_seconds and after.step.spread < 0.5 * before.step.spread
    assert after.range_reason == "this card was measured"
    assert planned("RTX 4090").step == other.step


def test_measuring_again_replaces_the_row(own):
    write_row(_found(), _card())
    write_row(_found(matmul_tflops=88.0), _card())
    assert find_gpu("RTX 4080").matmul_tflops == 88.0 and user_file().read_text().count("RTX 4080") == 1


def test_a_card_that_the_catalogue_does_not_have_gets_a_whole_row(own):
    _, name = write_row(_found(), _card("NVIDIA Marvel 9000", 20.0))
    card = find_gpu("NVIDIA Marvel 9000")
    assert (card.name, card.memory_gib, card.capability, card.rates) == (name, 20.0, (8, 9), "measured")
    assert make_plan(load_run(RUN).config, [card]).offers[0].step is not None


def test_a_slow_cpu_and_a_slow_disk_that_were_measured_count():
    config = load_run(["full-7b", "train.steps=10"]).config
    card = replace(find_gpu("H200"), launch_us=30.0)
    slow = replace(card, launch_us=120.0, disk_mbs=50.0)
    usual, slower = (make_plan(config, [one]).offers[0].run_time.parts for one in (card, slow))
    assert slower["saves"] > 3 * usual["saves"] and slower["starting"] > usual["starting"]
    assert slower["steps"] >= usual["steps"]


def test_several_gpus_that_were_measured_are_as_well_known_as_one():
    card = replace(find_gpu("RTX 4090"), rates="measured", allreduce_gbs=11.0)
    work = Workload(find_model("qwen2.5-1.5b"), engine="ddp", world_size=4)
    assert link_rate(work, card) == 11e9 and range_reason(card, 4) == "this card was measured"
    assert range_reason(find_gpu("H200"), 8) == "several of them were never measured"


def test_sharing_prints_the_row_and_no_path(own):
    assert called("plan", "--share").stdout.startswith("no card was measured here yet")
    write_row(_found(), _card())
    text = called("plan", "--share").stdout
    assert '[gpu."RTX 4080"]' in text and "matmul_tflops = 66" in text and "torch 2.11" in text
    assert str(own) not in text
    (own / "catalog.toml").write_text(text)  # what is printed is a catalogue
    assert find_gpu("RTX 4080").copy_gbs == 640.0


def test_the_command_measures_and_says_that_a_cpu_is_not_planned_for(own, monkeypatch):
    monkeypatch.setattr(measuring, "Size", lambda **_: SMALL)
    monkeypatch.setattr("sojourn.machine.gpus.gpus", list)
    done = called("doctor", "--measure", "--home", str(own))
    assert done.returncode == 0 and "matmuls: " in done.stdout and "nothing was written" in done.stdout
    facts = json.loads(called("doctor", "--measure", "--json", "--home", str(own)).stdout)
    assert facts["gpu"] is None and set(facts["measured"]) == set(VALUES)


def test_the_command_writes_the_row_of_a_gpu(own, monkeypatch):
    monkeypatch.setattr("sojourn.machine.gpus.gpus", lambda: [_card(used=3 * 2**30)])
    monkeypatch.setattr(measuring, "measure", lambda home, cards: _found())
    text = called("doctor", "--measure", "--home", str(own)).stdout
    assert "matmuls: 66 TFLOP/s" in text and "as RTX 4080" in text and "3.0 GiB of its memory were in use" in text
    assert catalogue_row(_found(), _card())[0] == "RTX 4080" == find_gpu("RTX 4080").name
    assert find_gpu("RTX 4080").rates == "measured"
