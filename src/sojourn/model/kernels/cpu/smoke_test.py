"""Compiles the CPU kernels and compares them with torch before they are used."""

from __future__ import annotations

import functools
import subprocess
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sojourn.model.attention import AttentionParams, attend
from sojourn.model.kernels.cpu import library
from sojourn.model.kernels.cpu.blocked_layer import BlockedLayer
from sojourn.model.kernels.cpu.decoder import decoder_on_cpu
from sojourn.model.kernels.cpu.decoder_layer import rms_norm
from sojourn.model.layout import Layout, compute_cu_seqlens, make_layout

_MAX_ERROR = 1e-5  # relative
_SHAPE = (2, 37, 3, 46)  # rows, tokens, heads, head size: not multiples of any vector


def enable_cpu_kernels(model: nn.Module) -> bool:
    """For this model, if they compute what torch computes, but for rounding. A failure is a note, not an error."""
    if (wrong := failure()) is not None:
        print(f"note: the CPU kernels failed their smoke test ({wrong.strip('_')}); using torch's, slower", flush=True)
        return False
    for module in (*model.modules(), model.get_output_embeddings()):
        if hasattr(module, "cpu_kernels") or module is model.get_output_embeddings():
            module.cpu_kernels = True
    return True


@functools.cache
def failure() -> str | None:
    """Of the smoke test, once per process: the kernel that computes something else, or why they cannot be compiled."""
    try:
        library.load_library()
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.manual_seed(0)
            checks = (_norm, _swiglu, _rope, _attention, _blocked_layer, _decoder, _loss, _head, _adamw)
            return next((check.__name__ for check in checks if not check()), None)
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def has_cpu_kernels(model: nn.Module) -> bool:
    """Whether they are enabled for this model."""
    return bool(getattr(model.get_output_embeddings(), "cpu_kernels", False))


def _is_close(values: list[Tensor], expected: list[Tensor]) -> bool:
    errors = (
        torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b) for a, b in zip(values, expected, strict=True)
    )
    return all(bool(error < _MAX_ERROR) for error in errors)


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return [
        output.detach(),
        *torch.autograd.grad(output, leaves, torch.linspace(-1, 1, output.numel()).view_as(output)),
    ]


def _norm() -> bool:
    x, weight = torch.randn(_SHAPE), torch.randn(_SHAPE[-1:])
    ours = _with_gradients(lambda x, weight: rms_norm(x, weight, 1e-5), x, weight)
    return _is_close(ours, _with_gradients(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5), x, weight))


def _swiglu() -> bool:
    gate, up = 5 * torch.randn(_SHAPE), torch.randn(_SHAPE)
    expected = _with_gradients(lambda gate, up: F.silu(gate) * up, gate, up)
    output = library.swiglu_forward(gate, up)
    grad = torch.linspace(-1, 1, gate.numel()).view_as(gate)
    library.swiglu_backward_(grad, gate, up)
    return _is_close([output, gate, up, grad], [*expected, expected[0]])


def _rope() -> bool:
    """Of heads that lie apart, and back again."""
    x, angles = (
        torch.randn(*_SHAPE[:2], 5, _SHAPE[3])[:, :, :3],
        torch.randn(*_SHAPE[:2], _SHAPE[3] // 2).repeat(1, 1, 2),
    )
    cos, sin, (first, second) = angles.cos(), angles.sin(), x.chunk(2, -1)
    rotated, back = torch.empty(_SHAPE), torch.empty(_SHAPE)
    library.rope(x, cos, sin, rotated)
    library.rope(rotated, cos, sin, back, -1.0)
    expected = x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]
    return _is_close([rotated, back], [expected, x])


def _two_documents_per_row() -> Layout:
    documents = np.zeros(_SHAPE[:2], np.int32)
    documents[:, 20:] = 1
    starts = torch.from_numpy(compute_cu_seqlens(documents))
    return make_layout("sdpa", documents, torch.from_numpy(documents), starts, ())


def _attention() -> bool:
    """With fewer heads of keys and values."""
    layout = _two_documents_per_row()
    query, key, value = (torch.randn(*_SHAPE[:2], heads, _SHAPE[3]) for heads in (6, 3, 3))
    params, grad = AttentionParams(_SHAPE[3] ** -0.5), torch.linspace(-1, 1, query.numel()).view_as(query)
    expected = _with_gradients(lambda q, k, v: attend(q, k, v, layout, params), query, key, value)
    output, lse = library.attention_forward(query, key, value, layout, params.scale)
    grads = library.attention_backward(grad, query, key, value, lse, layout, params.scale)
    return _is_close([output, *grads], expected)


def layer_by_torch(
    x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, scale: float, head_dim: int, weights: Sequence[Tensor]
) -> Tensor:
    """A decoder layer like Llama's, whose norms have an epsilon of 1e-5; `weights`: as layer_on_cpu has them."""

    def rotate(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]

    norm_1, w_q, w_k, w_v, w_o, norm_2, w_gate, w_up, w_down = weights
    normed = F.rms_norm(x, norm_1.shape, norm_1, 1e-5)
    query, key, value = ((normed @ weight.t()).unflatten(-1, (-1, head_dim)) for weight in (w_q, w_k, w_v))
    heads = attend(rotate(query), rotate(key), value, layout, AttentionParams(scale))
    x = x + heads.flatten(2) @ w_o.t()
    normed = F.rms_norm(x, norm_2.shape, norm_2, 1e-5)
    return x + (F.silu(normed @ w_gate.t()) * (normed @ w_up.t())) @ w_down.t()


_SIZE, _HEAD_DIM = 45, 22


def _layer_weights() -> list[Tensor]:
    size, ffn = _SIZE, 70
    shapes = [(66, size), (22, size), (22, size), (size, 66), (ffn, size), (ffn, size), (size, ffn)]
    matrices = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    return [torch.rand(size), *matrices[:4], torch.rand(size), *matrices[4:]]


def _rotation() -> tuple[Tensor, Tensor]:
    angles = torch.randn(*_SHAPE[:2], _HEAD_DIM // 2).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def _blocked_layer() -> bool:
    layout, weights, head_dim = _two_documents_per_row(), _layer_weights(), _HEAD_DIM
    x, rotation, scale = torch.randn(*_SHAPE[:2], _SIZE), _rotation(), head_dim**-0.5
    expected = _with_gradients(
        lambda x, *weights: layer_by_torch(x, *rotation, layout, scale, head_dim, weights), x, *weights
    )
    ours = _with_gradients(
        lambda x, *weights: BlockedLayer.apply(x, *rotation, layout, scale, head_dim, (1e-5, 1e-5), *weights),
        x,
        *weights,
    )
    return _is_close(ours, expected)


def decoder_by_torch(
    given: library.DecoderInputs, settings: library.DecoderSettings, weights: Sequence[Tensor]
) -> Tensor:
    """As decoder_on_cpu, with norms whose epsilon is 1e-5."""
    x = F.embedding(given.ids, weights[0], settings.padding if settings.padding >= 0 else None)
    for first in range(2, len(weights), 9):
        layer = weights[first : first + 9]
        x = layer_by_torch(x, given.cos, given.sin, given.layout, settings.scale, settings.head_dim, layer)
    return F.rms_norm(x.flatten(0, 1)[given.targets_N], weights[1].shape, weights[1], 1e-5)


def _decoder() -> bool:
    """Two layers, two tokens of three."""
    settings = library.DecoderSettings(_HEAD_DIM**-0.5, _HEAD_DIM, (1e-5,) * 5, padding=3)
    ids, targets = torch.randint(9, _SHAPE[:2]), (torch.arange(_SHAPE[0] * _SHAPE[1]) % 3).nonzero()[:, 0]
    given = library.DecoderInputs(ids, targets, *_rotation(), _two_documents_per_row())
    weights = [torch.randn(9, _SIZE), torch.rand(_SIZE), *_layer_weights(), *_layer_weights()]
    ours, expected = (
        _with_gradients(lambda *weights, of=of: of(given, settings, weights), *weights)
        for of in (decoder_on_cpu, decoder_by_torch)
    )
    return _is_close(ours, expected)


def _head() -> bool:
    hidden, weight, labels = torch.randn(70, 45), torch.randn(77, 45), torch.randint(-1, 77, (70,))
    leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
    losses = F.cross_entropy(leaves[0] @ leaves[1].t(), labels, ignore_index=-1, reduction="none")
    expected = [losses.detach(), *torch.autograd.grad(losses.sum(), leaves)]
    return _is_close(list(library.linear_cross_entropy(hidden, weight, labels)), expected)


def _loss() -> bool:
    logits, labels = 5 * torch.randn(40, 77), torch.randint(-1, 77, (40,))
    leaf = logits.clone().requires_grad_()
    losses = F.cross_entropy(leaf, labels, ignore_index=-1, reduction="none")
    expected = [losses.detach(), *torch.autograd.grad(losses.sum(), leaf)]
    return _is_close([library.cross_entropy_with_grad(logits, labels), logits], expected)


def _adamw() -> bool:
    weights, grads = ([torch.randn(size) for size in ((40, 77), (3,))] for _ in range(2))
    ours, expected = ([weight.clone().requires_grad_() for weight in weights] for _ in range(2))
    optimizer = torch.optim.AdamW(expected, lr=0.1, weight_decay=0.1, eps=1e-8)
    states = [(torch.zeros_like(weight), torch.zeros_like(weight), torch.tensor(0.0)) for weight in weights]
    for _ in range(2):
        for weight, grad in zip(expected, grads, strict=True):
            weight.grad = grad / 2
        optimizer.step()
        sizes, settings = array("q", [weight.numel() for weight in ours]), (0.9, 0.999, 0.1, 0.1, 1e-8) * len(ours)
        library.adamw_step(
            ours, grads, library.pointers([one for state in states for one in state]), sizes, settings, 0.5
        )
    norm = torch.tensor(library.sum_of_squares(grads)).sqrt()
    return _is_close([*ours, norm], [*expected, torch.nn.utils.get_total_norm(grads)])
