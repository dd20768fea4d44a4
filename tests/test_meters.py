"""What a run shows of itself: every value in its place, a line that fits, and an honest time left."""

import math

import pytest
from rich.console import Console

from sojourn.catalog.gpus import gpus, peak_flops
from sojourn.config.load import load_run
from sojourn.run.folder import RunFolder
from sojourn.train.metrics.meters import EvalScores, Meters, MfuInputs
from sojourn.train.metrics.progress_line import (
    ProgressLine,
    StepReport,
    fit_to_width,
    format_duration,
    format_plain_line,
)
from sojourn.train.metrics.throughput import Throughput

FULL = StepReport(2.1234, 123456.0, 80 * 2**30, mfu=0.41, data_wait=0.12, spent=1.2, projected=3.4, remaining=43140.0)


@pytest.fixture
def run(home) -> RunFolder:
    folder = RunFolder(home / "runs" / "t")
    folder.path.mkdir(parents=True)
    return folder


def _config(*words: str):
    return load_run(["smoke", "name=t", "train.device=cpu", "log.tensorboard=off", *words]).config


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _train(throughput: Throughput, clock: Clock, steps: int, seconds: float = 1.0) -> None:
    for _ in range(steps):
        clock.now += seconds
        throughput.count_step(100, waited=0.25 * seconds)


def _pause(throughput: Throughput, clock: Clock, seconds: float) -> None:
    with throughput.paused():
        clock.now += seconds


def test_a_logged_step_has_every_value_in_metrics_jsonl(run):
    with Meters(run, _config("limits.price_per_hour=2 CNY"), 100, 0, MfuInputs(6e6, 1e12)) as meters:
        for step in (1, 2, 3):
            meters.count_step(1000, waited=0.0)
            meters.log(step, 2.5, 1e-3, 0.7, 0.25, 100, spent=1.5)
    line = run.read_metrics()[-1]
    given = {"kind": "train", "step": 3, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.7, "epoch": 0.25}
    assert {key: line[key] for key in given} == given
    assert line["memory"] > 2**20 and line["data_wait"] == 0.0 and line["spent"] == 1.5
    assert line["projected"] == pytest.approx(1.5 + 2 * line["eta"] / 3600, abs=1e-3)
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 6e6 / 1e12, abs=1e-4)
    assert "memory_reserved" not in line  # only a GPU has such


def test_what_is_not_known_is_left_out_and_not_made_up(run, capsys):
    with Meters(run, _config(), 100, 0, MfuInputs(None, None)) as meters:
        meters.count_step(10, 0.0)
        meters.log(1, math.nan, 1e-3, 0.7, 0.25, 100, spent=None)
    line = run.read_metrics()[-1]
    assert line["loss"] is None
    assert not {"mfu", "spent", "projected", "eta"} & line.keys()
    assert "left" not in capsys.readouterr().out


def test_evaluations_and_samples_are_written_whole_and_shown_short(run, capsys):
    text = "first\nsecond\x1b[2J " + "long " * 100
    with Meters(run, _config(), 100, 0, MfuInputs()) as meters:
        meters.log_eval(10, EvalScores(1.5, 4.48, 0.412, 0.9, best=True))
        meters.log_samples(10, [("Say\nit", text)])
    evaluated, sample = run.read_metrics()
    assert evaluated["kind"] == "eval" and evaluated["best"] is True
    assert [evaluated[k] for k in ("loss", "perplexity", "accuracy", "bits_per_byte")] == [1.5, 4.48, 0.412, 0.9]
    assert (sample["kind"], sample["step"], sample["prompt"], sample["text"]) == ("sample", 10, "Say\nit", text)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("step 10: held-out loss 1.5000 · perplexity 4.48") and shown[0].endswith("best so far")
    assert shown[1].startswith("step 10: Say⏎it → first⏎second") and len(shown[1]) == 200 and "\x1b" not in shown[1]


def test_tensorboard_has_the_same_curves_and_a_continued_run_takes_back_the_steps_it_repeats(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = _config("log.tensorboard=auto", "limits.price_per_hour=2 CNY")
    for first, losses in ((0, [9.0, 8.0, 7.0]), (1, [5.0, 4.0])):
        with Meters(run, config, 10, first, MfuInputs(1e6, 1e9)) as meters:
            for step, loss in enumerate(losses, first + 1):
                meters.count_step(10, 0.0)
                meters.log(step, loss, 1e-3, 1.0, 0.1, 100, spent=0.1)
            meters.log_eval(step, EvalScores(1.5, 4.48, 0.4, 0.9))
            meters.log_samples(step, [("Hello", "World")])
    found = EventAccumulator(str(run.logs)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 9.0), (2, 5.0), (3, 4.0)]
    last = run.read_metrics()[-3]
    numbers = {f"train/{k}" for k, v in last.items() if isinstance(v, float | int)} - {"train/time", "train/step"}
    evals = {f"eval/{k}" for k in ("loss", "perplexity", "accuracy", "bits_per_byte")}
    assert set(found.Tags()["scalars"]) == numbers | evals
    assert b"World" in found.Tensors("sample/1/text_summary")[-1].tensor_proto.string_val[0]


def test_a_plain_line_tells_everything(run):
    said = "step 10/100 · loss 2.1234 · 123,456 tok/s · MFU 41 % · 80.0 GiB · data wait 12 % · "
    assert format_plain_line(10, 100, FULL) == said + "spent 1.20 of about 3.40 · 11h59m left"


def test_waiting_for_data_is_reported_only_when_it_matters():
    assert "data wait" not in format_plain_line(1, 2, StepReport(1.0, 1.0, 1, data_wait=0.05))
    assert "data wait 6 %" in format_plain_line(1, 2, StepReport(1.0, 1.0, 1, data_wait=0.06))


@pytest.mark.parametrize("width", [30, 60, 80, 100, 140, 250])
def test_the_live_line_fits_the_terminal_and_keeps_what_matters_most(width):
    line = ProgressLine(total=100_000, step=0)
    line.show(99_999, FULL)
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(line)
    (shown,) = captured.get().splitlines()
    assert len(shown.rstrip()) < width and "step 99999/100000" in shown
    for word, needs in (("loss", 30), ("left", 60), ("spent 1.20 of about 3.40", 80), ("tok/s", 100), ("MFU", 100)):
        assert word in shown or width < needs, word
    assert all(text in shown for _, text in FULL.parts()) or width < 140


def test_the_bar_takes_the_room_that_is_left_over():
    head, bar, tail = fit_to_width(5, 10, StepReport(1.0, 10.0, 2**30, remaining=9.0).parts(), 99)
    assert (head, bar, tail) == ("step 5/10", 20, "loss 1.0000 · 10 tok/s · 1.0 GiB · 9s left")


def test_time_is_told_as_exactly_as_one_needs_it():
    assert [format_duration(s) for s in (0.4, 42.0, 750.0, 18_755.0)] == ["0s", "42s", "12m30s", "5h13m"]


def test_a_lap_counts_tokens_and_waiting_without_the_pauses():
    clock = Clock()
    throughput = Throughput(clock)
    _train(throughput, clock, 10)
    _pause(throughput, clock, 50.0)
    interval = throughput.end_interval()
    assert (interval.steps, interval.seconds, interval.tokens_per_second, interval.data_wait) == (10, 10.0, 100.0, 0.25)


def test_a_slow_first_step_does_not_spoil_the_time_left():
    clock = Clock()
    throughput = Throughput(clock)
    _train(throughput, clock, 1, seconds=120.0)
    throughput.end_interval()
    assert throughput.remaining_seconds(100) is None  # better than a hundred times two minutes
    _train(throughput, clock, 9)
    throughput.end_interval()
    assert throughput.remaining_seconds(100) == pytest.approx(100.0)


def test_a_slow_first_step_in_a_longer_lap_does_not_spoil_it_either():
    clock = Clock()
    throughput = Throughput(clock)
    _train(throughput, clock, 1, seconds=120.0)
    _train(throughput, clock, 9)
    throughput.end_interval()
    assert throughput.remaining_seconds(100) == pytest.approx(100.0)


def test_the_time_left_follows_the_recent_speed():
    clock = Clock()
    throughput = Throughput(clock)
    for seconds in (1.0, 4.0):
        for _ in range(15):
            _train(throughput, clock, 10, seconds)
            throughput.end_interval()
    assert throughput.remaining_seconds(10) == pytest.approx(40.0)


def test_the_time_left_has_its_share_of_pauses_and_does_not_jump_between_them():
    clock = Clock()
    throughput = Throughput(clock)
    seen = []
    for step in range(1, 101):
        _train(throughput, clock, 1)
        if step % 5 == 0:
            throughput.end_interval()
            seen.append(throughput.remaining_seconds(100))
        _pause(throughput, clock, 5.0 if step % 20 == 0 else 0.0)
    assert seen[:4] == pytest.approx([100.0] * 4)  # no pause has been seen yet
    assert seen[4:] == pytest.approx([125.0] * 16)


def test_a_single_long_pause_at_the_start_is_forgotten_in_time():
    clock = Clock()
    throughput = Throughput(clock)
    _train(throughput, clock, 1)
    _pause(throughput, clock, 100.0)
    _train(throughput, clock, 999)
    throughput.end_interval()
    assert throughput.remaining_seconds(100) == pytest.approx(110.0, abs=0.2)


def _as_torch_says(name: str) -> str:
    """A catalogue's name as the driver reports it."""
    if name.startswith("RTX A"):
        return f"NVIDIA {name}"
    if name.startswith("RTX"):
        return f"NVIDIA GeForce {name.replace('4090D', '4090 D').removesuffix(' 12GB').removesuffix(' 16GB')}"
    if name[0] in "PVT":
        board = "-SXM2-" if name[0] == "V" and not name.endswith("PCIe") else "-PCIE-"
        return f"Tesla {name.removesuffix(' PCIe').replace(' ', board)}"
    return f"NVIDIA {name.replace(' ', '-SXM4-') if name.endswith('GB') else name}"


@pytest.mark.parametrize("row", [row for row in gpus() if not (row.unified or row.refused)], ids=lambda row: row.name)
def test_the_most_a_gpu_can_do_is_found_by_the_name_that_torch_gives_it(row):
    name = _as_torch_says(row.name)
    assert peak_flops(name, "fp16") == 1e12 * row.fp16_tflops
    assert peak_flops(name, "bf16") == (row.bf16_tflops and 1e12 * row.bf16_tflops)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GeForce RTX 4090 D", 147.1), ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A10", 125), ("NVIDIA RTX A6000", 154.8), ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4060 Ti", 44.1), ("NVIDIA L40S", 362), ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4060", None), ("NVIDIA A10G", 70), ("NVIDIA L40", 181), ("Tesla T4", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 3080 Ti", 68.2), ("Radeon RX 7900", None),
    ],
)  # fmt: skip
def test_a_gpu_is_never_taken_for_a_sister_with_a_similar_name(name, tflops):
    assert peak_flops(name, "bf16") == (tflops and pytest.approx(1e12 * tflops))


def test_no_rate_is_made_up_for_a_precision_that_the_catalogue_does_not_have():
    assert peak_flops("NVIDIA H200", "fp32") is None
