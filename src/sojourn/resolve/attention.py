"""Which attention backend a run uses."""

from __future__ import annotations

from sojourn.catalog.models import ModelSpec
from sojourn.config.attention_backends import ATTENTION_BACKENDS, AttentionBackend
from sojourn.resolve.device_spec import DeviceSpec

_DEVICE_NAMES = {"cuda": "a CUDA GPU", "mps": "an Apple GPU", "cpu": "a CPU"}


def attention_unsupported_reason(
    backend: AttentionBackend, model: ModelSpec, precision: str, device: DeviceSpec
) -> str | None:
    """Why this model cannot use the backend on this device, or None."""
    head_dim = model.head_dim
    if not backend.packed:
        return "takes rows of one document only"
    if device.device_type not in backend.devices:
        devices = " or ".join(_DEVICE_NAMES.get(name, name) for name in backend.devices)
        return f"needs {devices}, but this run is on {device.device_type}"
    if precision not in backend.dtypes:
        return f"needs {' or '.join(backend.dtypes)}, but this run is in {precision}"
    if backend.max_head_dim is not None and head_dim > backend.max_head_dim:
        return f"takes head sizes up to {backend.max_head_dim}, but this model's is {head_dim}"
    if head_dim % backend.head_dim_multiple:
        return f"takes multiples of {backend.head_dim_multiple} as head sizes, but this model's is {head_dim}"
    is_cuda, capability = device.device_type == "cuda", device.compute_capability or (0, 0)
    if is_cuda and backend.min_capability is not None and capability < backend.min_capability:
        return f"needs a GPU of compute capability {_dotted(backend.min_capability)} or newer"
    if backend.min_torch is not None and device.torch_version < backend.min_torch:
        return f"needs torch {_dotted(backend.min_torch)} or newer"
    if backend.package is not None and backend.package not in device.packages:
        return f"needs the package {backend.package}, which is not installed"
    if model.softcap and not backend.softcap:
        return "has no logit soft-capping, which this model's attention has"
    if model.sliding_window and not backend.sliding_window:
        return "has no sliding windows, which this model's attention has"
    if model.attention_dropout and not backend.dropout:
        return "has no dropout, which this model's attention has"
    return None


def supported_attention(model: ModelSpec, precision: str, device: DeviceSpec) -> list[str]:
    """The backends that should work, the fastest first."""
    return [
        name
        for name, backend in ATTENTION_BACKENDS.items()
        if attention_unsupported_reason(backend, model, precision, device) is None
    ]


def choose_attention(model: ModelSpec, precision: str, device: DeviceSpec) -> str:
    """The fastest backend that should work, and did where it was tried."""
    supported = supported_attention(model, precision, device)
    return next((name for name in supported if name not in device.failed_attention), "math")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
