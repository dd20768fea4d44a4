"""kernels.c as a library: compiled once by gcc, kept in the user's cache, and called through ctypes.

Modules with the attribute `cpu_kernels` use them (smoke_test.py sets it). They share torch's OpenMP threads: two pools
would wait for each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sojourn.machine.probe_software import find_gcc

ROWS_PER_SUM = 32  # as in kernels.c
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_MIN_PARALLEL = 16384  # elements; fewer are faster in one thread
_DTYPES = (torch.float32, torch.int64)
_TIMEOUT = 120.0  # seconds to compile; it takes one or two

_Strides = ctypes.c_int64 * 3
_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm_forward": (_P, _P, _P, _P, _N, _N, _F, _I),
    "rms_norm_backward": (_P, _P, _P, _P, _P, _P, _P, _N, _N, _I),
    "swiglu_forward": (_P, _P, _P, _N, _I),
    "swiglu_backward": (_P, _P, _P, _N, _I),
    "rope": (_P, _Strides, _P, _P, _P, _Strides, _N, _N, _N, _N, _F, _I),
    "cross_entropy": (_P, _P, _P, _N, _N, _I),
}


@cache
def load_library() -> Any:
    """Raises OSError or subprocess.SubprocessError where it cannot be compiled or loaded."""
    gcc, openmp = find_gcc(), _torch_openmp()
    if gcc is None or openmp is None:
        raise OSError("no gcc" if gcc is None else "torch has no libgomp")
    native = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    command = [gcc, *_FLAGS, native, str(_SOURCE), str(openmp), "-lm"]
    file = _cached_file(command, gcc)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f".{os.getpid()}-{file.name}")
        subprocess.run([*command, "-o", str(made)], capture_output=True, check=True, timeout=_TIMEOUT)
        made.replace(file)
    library = ctypes.CDLL(str(file))
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def _torch_openmp() -> Path | None:
    package = Path(torch.__file__).parent
    found = [*(package / "lib").glob("libgomp*.so*"), *(package.parent / "torch.libs").glob("libgomp*.so*")]
    return found[0] if found else None


def _cached_file(command: list[str], gcc: str) -> Path:
    """Its name is what the library is made from, and for which CPU."""
    from platformdirs import user_cache_path

    parts = (_SOURCE.read_bytes(), repr(command).encode(), str(Path(gcc).stat().st_mtime_ns).encode(), _cpu_features())
    return user_cache_path("sojourn") / "cpu_kernels" / f"{hashlib.sha256(b'/'.join(parts)).hexdigest()[:32]}.so"


def _cpu_features() -> bytes:
    """Of the first CPU: the same home may be mounted on machines of different kinds."""
    first = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].splitlines()
    return b"\n".join(line for line in first if line.startswith((b"model name", b"flags", b"Features", b"CPU part")))


def cpu_kernels_take(*tensors: Tensor) -> bool:
    """Whether the kernels are made for these tensors: fp32, or int64 labels."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(x.device.type == "cpu" and x.dtype in _DTYPES and x.is_contiguous() for x in tensors)
    )


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _MIN_PARALLEL else 1


def rms_norm_forward(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows, and the scale of each (N)."""
    rows, size = x_ND.shape
    out_ND, scale_N = torch.empty_like(x_ND), x_ND.new_empty(rows)
    pointers = (x_ND.data_ptr(), weight_D.data_ptr(), out_ND.data_ptr(), scale_N.data_ptr())
    load_library().rms_norm_forward(*pointers, rows, size, eps, _threads(x_ND.numel()))
    return out_ND, scale_N


def rms_norm_backward(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor, residual_grad_ND: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x, to which `residual_grad_ND` is added, and of the weight."""
    rows, size = x_ND.shape
    out_ND, partial = torch.empty_like(x_ND), x_ND.new_empty(-(-rows // ROWS_PER_SUM), size)
    pointers = [tensor.data_ptr() for tensor in (grad_ND, x_ND, weight_D, scale_N)]
    pointers += [0 if residual_grad_ND is None else residual_grad_ND.data_ptr(), out_ND.data_ptr(), partial.data_ptr()]
    load_library().rms_norm_backward(*pointers, rows, size, _threads(x_ND.numel()))
    return out_ND, partial.sum(0)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    out, size = torch.empty_like(gate), gate.numel()
    load_library().swiglu_forward(gate.data_ptr(), up.data_ptr(), out.data_ptr(), size, _threads(size))
    return out


def swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """`gate` and `up` become their own gradients."""
    size = gate.numel()
    load_library().swiglu_backward(grad.data_ptr(), gate.data_ptr(), up.data_ptr(), size, _threads(size))


def rope(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, out_BTHD: Tensor, sign: float = 1.0) -> None:
    """Into `out_BTHD`, which may be `x_BTHD`. `sign` -1 rotates back."""
    pointers = (cos_BTD.data_ptr(), sin_BTD.data_ptr(), out_BTHD.data_ptr(), _Strides(*out_BTHD.stride()[:3]))
    load_library().rope(
        x_BTHD.data_ptr(), _Strides(*x_BTHD.stride()[:3]), *pointers, *x_BTHD.shape, sign, _threads(x_BTHD.numel())
    )


def cross_entropy_with_grad(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Each token's loss; the logits become their gradient. Labels below 0 are ignored."""
    losses_C = logits_CV.new_empty(len(labels_C))
    pointers = (logits_CV.data_ptr(), labels_C.data_ptr(), losses_C.data_ptr())
    load_library().cross_entropy(*pointers, *logits_CV.shape, _threads(logits_CV.numel()))
    return losses_C
