"""Energy of GPUs: read from a driver that may have no counter, fail or hang, kept over calls, and in the model card."""

import subprocess
import threading
import time

import pytest

from sojourn.export.card import model_card
from sojourn.export.formats import FORMATS
from sojourn.machine import gpu_energy
from sojourn.machine.gpu_energy import EnergyMeter, NoAnswer, NvmlGpu, energy_meter
from sojourn.run.ledger import Ledger
from sojourn.storage.files import read_json, write_json

DRIVER = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) { *gpu = (void *)7; return strcmp(uuid, "GPU-12-34") ? 6 : 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) { *milliwatts = 250000; return gpu != (void *)7; }
#ifdef COUNTER
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *mj) { *mj = 5000000000000ull; return gpu != (void *)7; }
#endif
"""  # noqa: E501


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver of our own: `driver("-DCOUNTER")` has an energy counter."""
    source = tmp_path / "nvml.c"
    source.write_text(DRIVER)

    def build(*flags):
        library = tmp_path / f"nvml{len(flags)}.so"
        subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        monkeypatch.setattr(gpu_energy, "_LIBRARY", str(library))

    return build


class Counter:
    """Joules as given, one a reading; None: the driver does not answer."""

    def __init__(self, *joules):
        self.left, self.read = list(joules), threading.Event()

    def joules(self):
        joules = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if len(self.left) == 1:
            self.read.set()
        if joules is None:
            raise NoAnswer
        return joules


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(gpu_energy, "_INTERVAL", 0.01)


def test_the_drivers_counter_is_read(driver):
    driver("-DCOUNTER")
    assert NvmlGpu("12-34").joules() == 5e9
    with pytest.raises(NoAnswer, match="nvmlDeviceGetHandleByUUID: error 6"):
        NvmlGpu("GPU-56")


def test_power_is_added_up_where_a_gpu_has_no_counter(driver):
    driver()
    gpu, began = NvmlGpu("GPU-12-34"), time.monotonic()
    gpu.joules()
    time.sleep(0.02)
    assert 250 * 0.02 <= gpu.joules() <= 250 * (time.monotonic() - began) + 1


def test_without_a_driver_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(gpu_energy, "_LIBRARY", "libnothing.so.1")
    with energy_meter(["GPU-12-34"]) as meter:
        pass
    assert (meter.joules, meter.seconds) == (0.0, 0.0)


def test_intervals_without_an_answer_or_with_a_new_counter_are_left_out(often):
    counter = Counter(100.0, 130.0, None, 500.0, 510.0, 3.0, 5.0)
    with EnergyMeter([counter]) as meter:
        counter.read.wait(10)
    assert meter.joules == 30 + 10 + 2 and meter.seconds > 0


def test_the_energy_of_all_gpus_is_summed(often):
    counters = [Counter(0.0, 1.0, 3.0), Counter(10.0, 20.0, 40.0)]
    with EnergyMeter(counters) as meter:
        counters[1].read.wait(10)
    assert meter.joules == 3 + 30


def test_a_driver_that_hangs_holds_up_nothing(often):
    hung = threading.Event()

    class Hangs:
        def joules(self):
            hung.wait(30)
            return 0.0

    began = time.monotonic()
    with EnergyMeter([Hangs()]) as meter:
        pass
    hung.set()
    assert time.monotonic() - began < 5 and meter.seconds == 0


def test_the_ledger_adds_the_energy_of_all_calls(tmp_path, often):
    path = tmp_path / "ledger.json"
    for _ in range(2):
        counter = Counter(0.0, 40.0)
        ledger = Ledger.open(path, None, time.monotonic(), is_main_process=True)
        ledger.energy = EnergyMeter([counter])
        with ledger:
            counter.read.wait(10)
    written = read_json(path)
    assert written["energy_joules"] == 80.0 and 0 <= written["energy_seconds"] <= written["seconds"]


@pytest.mark.parametrize("damage", ["many", -1, float("inf"), None])
def test_an_energy_that_is_none_is_forgotten_and_nothing_else(tmp_path, damage):
    path = tmp_path / "ledger.json"
    write_json(path, {"seconds": 50.0, "money": 2.0, "energy_joules": damage, "energy_seconds": 50.0})
    ledger = Ledger.open(path, None, time.monotonic(), is_main_process=True)
    assert (ledger.before, ledger.paid, ledger.energy_before) == (50.0, 2.0, (0.0, 0.0))


@pytest.mark.parametrize(
    ("measured", "row"),
    [
        ({}, "not measured"),
        ({"energy_joules": 9.0e6, "energy_seconds": 7150.0}, "2.50 kWh"),
        ({"energy_joules": 45_000.0, "energy_seconds": 7200.0}, "12.5 Wh"),
        ({"energy_joules": 9.0e6, "energy_seconds": 3600.0}, "at least 2.50 kWh (measured for 1.00 h)"),
    ],
)
def test_the_model_card_has_the_energy_or_says_that_none_was_measured(measured, row):
    lineage = {"base": "ORG/base", "cost": {"seconds": 7200.0, **measured}}
    card = model_card("mine", FORMATS["hf"], "auto", lineage, {"gate": {}}, {})
    assert f"| energy of the GPUs | {row} |" in card
