"""The C files of a folder as a library: compiled once by gcc, kept in the user's cache, and called through ctypes.

Its functions share torch's OpenMP threads: two pools would wait for each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from sojourn.machine.probe_software import find_gcc

_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_SHARED = Path(__file__).parent  # has vector_math.h
_MIN_PARALLEL = 16384  # elements; fewer are faster in one thread
_TIMEOUT = 300.0  # seconds to compile; it takes one to six on an idle machine


def compile_library(folder: Path, signatures: dict[str, tuple[Any, ...]]) -> Any:
    """`signatures`: the types of each function's arguments; none returns anything. Raises OSError or
    subprocess.SubprocessError where it cannot be compiled or loaded."""
    gcc, openmp = find_gcc(), _torch_openmp()
    if gcc is None or openmp is None:
        raise OSError("no gcc" if gcc is None else "torch has no libgomp")
    native = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    sources = sorted(map(str, folder.glob("*.c")))
    command = [gcc, *_FLAGS, native, f"-I{_SHARED}", *sources, str(openmp), "-lm"]
    file = _cached_file(folder, [gcc, *_FLAGS, native, openmp.name])
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f".{os.getpid()}-{file.name}")
        subprocess.run([*command, "-o", str(made)], capture_output=True, check=True, timeout=_TIMEOUT)
        made.replace(file)
    library = ctypes.CDLL(str(file))
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def _torch_openmp() -> Path | None:
    package = Path(torch.__file__).parent
    found = [*(package / "lib").glob("libgomp*.so*"), *(package.parent / "torch.libs").glob("libgomp*.so*")]
    return found[0] if found else None


def _cached_file(folder: Path, compiler: list[str]) -> Path:
    """Its name is what the library is made from, and for which CPU; another environment of the same version finds it,
    as torch has its OpenMP under the same name there."""
    from platformdirs import user_cache_path

    files = [file for place in (folder, _SHARED) for file in sorted(place.glob("*.[ch]"))]
    made_by = repr([compiler, Path(compiler[0]).stat().st_mtime_ns]).encode()
    parts = (*(file.read_bytes() for file in files), made_by, _cpu_features())
    return user_cache_path("sojourn") / "cpu_kernels" / f"{hashlib.sha256(b'/'.join(parts)).hexdigest()[:32]}.so"


def _cpu_features() -> bytes:
    """Of the first CPU: the same home may be mounted on machines of different kinds."""
    first = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
    return b"\n".join(line for line in first if line.startswith((b"model name", b"flags", b"Features", b"CPU part")))


def threads_for(elements: int) -> int:
    """Threads for an operation that reads and writes so many elements once."""
    return torch.get_num_threads() if elements >= _MIN_PARALLEL else 1
