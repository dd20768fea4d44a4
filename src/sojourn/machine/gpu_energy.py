"""The energy that GPUs use, as their driver reports it through NVML: its energy counter, or its power readings where a
GPU has no counter (before Volta). It is that of the whole GPU, other processes included."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

_INTERVAL = 1.0  # seconds between readings
_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


class NoAnswer(Exception):
    """There is no driver, or it failed."""


class EnergyCounter(Protocol):
    def joules(self) -> float:
        """Since some moment in the past."""


class NvmlGpu:
    def __init__(self, uuid: str) -> None:
        """`uuid`: as torch has it, or as nvidia-smi does (GPU-…)."""
        try:
            self._nvml: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NoAnswer(str(error)) from error
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._handle))
        self._integral, self._then = 0.0, time.monotonic()

    def joules(self) -> float:
        try:
            return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1000
        except NoAnswer:  # no counter
            watts, now = self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint()) / 1000, time.monotonic()
            self._integral += watts * (now - self._then)
            self._then = now
            return self._integral

    def _read(self, function: str, value: Any) -> int:
        self._call(function, self._handle, ctypes.byref(value))
        return int(value.value)

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            status = getattr(self._nvml, function)(*arguments)
        except AttributeError as error:  # an old driver
            raise NoAnswer(str(error)) from error
        if status != 0:
            raise NoAnswer(f"{function}: error {status}")


class EnergyMeter:
    """Counts from `with` on, in a thread of its own: a driver that does not answer holds up nothing. `joules` were
    measured in `seconds`: fewer than have passed where the driver gave no answer."""

    def __init__(self, gpus: Sequence[EnergyCounter]) -> None:
        self.joules, self.seconds = 0.0, 0.0
        self._gpus = gpus
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read_regularly, name="gpu-energy", daemon=True)

    def __enter__(self) -> EnergyMeter:
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._gpus:
            self._thread.join(timeout=_INTERVAL)

    def _read_regularly(self) -> None:
        then, before = time.monotonic(), self._read()
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(_INTERVAL)
            now, joules = time.monotonic(), self._read()
            if before is not None and joules is not None and joules >= before:  # less: the driver was loaded anew
                self.joules, self.seconds = self.joules + joules - before, self.seconds + now - then
            then, before = now, joules

    def _read(self) -> float | None:
        try:
            return sum(gpu.joules() for gpu in self._gpus)
        except NoAnswer:
            return None


def energy_meter(uuids: Sequence[str]) -> EnergyMeter:
    """Of these GPUs; it measures nothing where there is no driver, or it does not know one of them."""
    try:
        return EnergyMeter([NvmlGpu(uuid) for uuid in uuids])
    except NoAnswer:
        return EnergyMeter([])
