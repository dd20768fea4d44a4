"""Which attention implementations really run forward and backward on this device, and which one is used."""

import warnings
from typing import Any

from sojourn.machine.finding import Finding, one_line
from sojourn.machine.precision import choose_device, choose_precision
from sojourn.machine.probe_software import importable, installed

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


def attention(torch: Any) -> Finding:
    """Tries each of torch's attention backends and the flash-attn package with a causal forward and backward."""
    device = choose_device("auto")
    name, _ = choose_precision(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    q, k, v = (torch.randn(1, 4, 64, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    exact = _reference(torch, q, k, v)
    worked, failed = [], {}
    for backend in BACKENDS:
        problem = _try_sdpa(torch, backend, (q, k, v), exact)
        if problem is None:
            worked.append(backend)
        else:
            failed[backend] = problem
    used = _used(torch, (q, k, v)) or (worked[0] if worked else "none")
    package = _flash_attn(torch, device, dtype)
    data = {
        "device": device,
        "precision": name,
        "worked": worked,
        "failed": failed,
        "used": used,
        "flash_attn": package,
    }
    if not worked:
        return Finding("attention", "fail", "no attention backend of torch works on this device", data=data)
    message = f"torch uses {used} on {device}; forward and backward work with {', '.join(worked)}"
    if installed("flash-attn") is not None:
        message += f"; flash-attn package: {package}"
    if device == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        there = all(installed(name) for name in ("quack-kernels", "flash-attn-4"))
        message += "; kernels for Hopper are installed" if there else "; faster ones: pip install 'sojourn[hopper]'"
    if device == "cuda" and worked == ["math"]:
        return Finding("attention", "warn", f"{message}: long sequences will be slow and take much memory", data=data)
    return Finding("attention", "ok", message, data=data)


def _reference(torch: Any, q: Any, k: Any, v: Any) -> Any:
    """Causal attention written out in float32 on the CPU."""
    q, k, v = (x.detach().float().cpu() for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def _try_sdpa(torch: Any, backend: str, qkv: tuple[Any, Any, Any], exact: Any) -> str | None:
    """None when it works, else why not."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = getattr(SDPBackend, BACKENDS[backend], None)
    if kind is None:
        return "this torch does not have it"
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(kind):
                out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
            gradients = torch.autograd.grad(out.float().square().sum(), qkv)
        except (RuntimeError, NotImplementedError) as error:
            return str(reasons[0].message).splitlines()[0] if reasons else one_line(error)
    off = float((out.detach().float().cpu() - exact).abs().max())
    if not off < 0.05:
        return f"gives wrong numbers (off by {off:.2g})"
    if not all(bool(torch.isfinite(g).all()) for g in gradients):
        return "gives gradients that are not finite"
    return None


def _used(torch: Any, qkv: tuple[Any, Any, Any]) -> str | None:
    """The backend that torch itself picks for these tensors."""
    from torch.nn.attention import SDPBackend

    try:
        chosen = int(torch._fused_sdp_choice(*qkv, None, 0.0, True))
    except (AttributeError, RuntimeError, TypeError):
        return None  # not a public function: do without it when it goes
    return next((n for n, member in BACKENDS.items() if int(getattr(SDPBackend, member, -9)) == chosen), None)


def _flash_attn(torch: Any, device: str, dtype: Any) -> str:
    if not importable("flash_attn"):
        return "not installed"
    if device != "cuda" or dtype == torch.float32:
        return "needs a CUDA GPU and bf16 or fp16"
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

        q, k, v = (torch.randn(1, 64, 4, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        flash_attn_func(q, k, v, causal=True).float().square().sum().backward()
    except Exception as error:  # a wheel built for another torch fails at import, in many ways
        return f"does not work: {one_line(error)}"
    return "works"
