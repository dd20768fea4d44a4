"""Weights in FP8, int8 or NF4, and `linear` with them: converted to bf16 in registers, on the way to the tensor cores.

Every output has a scale in fp32. NF4 has a second one for each block of 64 inputs, relative to the first, in fp16.

Weights lie in chunks of 2,048 bytes, in the order in which threads hold a tile of 64 outputs for Hopper's `wgmma`: each
reads 16 bytes of a chunk, and converts them in place. A chunk is 32 inputs of FP8 or int8, or 64 of NF4, where the
second half is in the upper half of each byte. Other GPUs exchange values between threads first, which is slower.

Few tokens leave most of a GPU idle where each program computes its outputs alone, so the inputs are split, too; the
program that comes last adds the partial sums, in a fixed order.

Shapes: T tokens, I inputs, O outputs; M tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sojourn.model.kernels.early_launch import early_launch, wait_for_inputs

MOST_TOKENS = 256  # for more, dequantizing the weights first is faster
_TILE = 64  # outputs
_CHUNK = 2048  # bytes of a tile
_SPAN = {"fp8": 32, "int8": 32, "nf4": 64}  # inputs of a chunk
_AT_A_TIME = 1 << 26  # weights that are quantized
_MAX_TILES = 1 << 14
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


@dataclass(frozen=True)
class Quantized:
    """`chunks`: tiles x chunks x bytes; outputs and inputs are padded. `block_scale`: of NF4, tiles x chunks x 64."""

    kind: str
    chunks: Tensor
    scale_O: Tensor
    inputs: int
    block_scale: Tensor | None = None

    @property
    def outputs(self) -> int:
        return len(self.scale_O)


def quantize(weight_OI: Tensor, kind: str) -> Quantized:
    rows = max(_TILE, _AT_A_TIME // weight_OI.shape[1] // _TILE * _TILE)
    parts = [_quantize(part.float(), kind) for part in weight_OI.split(rows)]
    blocks = [part.block_scale for part in parts if part.block_scale is not None]
    return Quantized(
        kind, torch.cat([part.chunks for part in parts]), torch.cat([part.scale_O for part in parts]),
        weight_OI.shape[1], torch.cat(blocks) if blocks else None,
    )  # fmt: skip


def _quantize(weight_OI: Tensor, kind: str) -> Quantized:
    most_O, inputs = weight_OI.abs().amax(1).clamp(min=1e-12), weight_OI.shape[1]
    padded = F.pad(weight_OI, (0, -inputs % _SPAN[kind], 0, -len(weight_OI) % _TILE))
    if kind != "nf4":
        dtype, largest = (torch.float8_e4m3fn, 448.0) if kind == "fp8" else (torch.int8, 127.0)
        scaled = padded * F.pad(largest / most_O, (0, len(padded) - len(most_O)))[:, None]
        values = (scaled if kind == "fp8" else scaled.round()).to(dtype)
        return Quantized(kind, _in_chunks(values.view(torch.uint8), 1).view(dtype), most_O / largest, inputs)
    code = torch.tensor(NF4, device=weight_OI.device)
    blocks = padded.unflatten(1, (-1, _SPAN[kind]))
    absmax_OB = blocks.abs().amax(2)
    index = torch.bucketize(blocks / absmax_OB.clamp(min=1e-12)[..., None], (code[1:] + code[:-1]) / 2)
    relative = (absmax_OB / F.pad(most_O, (0, len(padded) - len(most_O)), value=1.0)[:, None]).half()
    relative = relative.unflatten(0, (-1, _TILE)).transpose(1, 2).contiguous()
    return Quantized(kind, _in_chunks(index.to(torch.uint8).flatten(1), 2), most_O, inputs, relative)


def _in_chunks(bytes_OI: Tensor, halves: int) -> Tensor:
    """The inverse of `_as_tile`. Rows of a tile: warp, half, quarter of the lanes. Inputs of a chunk: half of the byte,
    `wgmma`, half of it, lane of a quarter, one of two."""
    parts = bytes_OI.reshape(-1, 4, 2, 8, bytes_OI.shape[1] // (32 * halves), halves, 2, 2, 4, 2)
    parts = parts.permute(5, 0, 4, 1, 3, 8, 6, 7, 2, 9).flatten(3).contiguous()
    return parts[0] if halves == 1 else parts[0] | parts[1] << 4


@cache
def _code(device: torch.device) -> Tensor:
    """As the kernels have it: bf16 numbers."""
    return torch.tensor(NF4, device=device).bfloat16().float()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _counters(device: torch.device) -> Tensor:
    """Of programs that have finished, for each tile; the last one sets it to 0 again."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def _nf4_to_bf16(pairs, code, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high half of each byte."""
    if INTERPRETED:
        return tl.load(code + (pairs & 15)).to(tl.bfloat16), tl.load(code + (pairs >> 4)).to(tl.bfloat16)
    # Four bytes at a time. `prmt` picks bytes by three bits each, from codes 0 to 7 and from 8 to 15, then by the
    # fourth bit one of both; once for the upper bytes of bf16 numbers and once for the lower.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 three, fourth, a, b, upper, lower;
        and.b32 three, $4, 0x77777777;
        shr.u32 fourth, $4, 1;
        lop3.b32 fourth, fourth, 0x44444444, 0x32103210, 0xEA;
        prmt.b32 a, 0xBEBFBFBF, 0x00BDBEBE, three;
        prmt.b32 b, 0x3E3E3E3D, 0x3F3F3F3E, three;
        prmt.b32 upper, a, b, fourth;
        prmt.b32 a, 0xCA063280, 0x00BA3D92, three;
        prmt.b32 b, 0xAD7C25A3, 0x803910E2, three;
        prmt.b32 lower, a, b, fourth;
        prmt.b32 $0, lower, upper, 0x6240;
        prmt.b32 $2, lower, upper, 0x7351;
        shr.u32 three, three, 16;
        shr.u32 fourth, fourth, 16;
        prmt.b32 a, 0xBEBFBFBF, 0x00BDBEBE, three;
        prmt.b32 b, 0x3E3E3E3D, 0x3F3F3F3E, three;
        prmt.b32 upper, a, b, fourth;
        prmt.b32 a, 0xCA063280, 0x00BA3D92, three;
        prmt.b32 b, 0xAD7C25A3, 0x803910E2, three;
        prmt.b32 lower, a, b, fourth;
        prmt.b32 $1, lower, upper, 0x6240;
        prmt.b32 $3, lower, upper, 0x7351;
        }""",
        "=r,=r,=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _as_tile(chunks, COUNT: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks side by side as outputs x inputs; no value changes its thread."""
    parts = chunks.reshape(COUNT, 4 * TILES, 8, 4, 2, 2, 2, 2).permute(1, 6, 2, 0, 4, 5, 3, 7)
    return parts.reshape(64 * TILES, 32 * COUNT)


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
    chunks, block_scale, code, values, inside, begin, end, inputs,
    KIND: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Of chunks `begin` to `end`, COUNT at a time."""
    sums = tl.zeros([64 * TILES, BLOCK_M], tl.float32)
    SPAN: tl.constexpr = 64 if KIND == "nf4" else 32
    for start in range(begin, end, COUNT):
        if KIND == "nf4":
            raw, scales, parts = (), (), ()
            for at in tl.static_range(COUNT):  # all loads before the first wait
                chunk = start + at if EVEN else tl.minimum(start + at, end - 1)
                column = (start + at) * SPAN + tl.arange(0, SPAN)
                raw = raw + (tl.load(chunks + chunk * 2048, eviction_policy="evict_first"),)
                scales = scales + (tl.load(block_scale + chunk * 64),)
                mask = inside if EVEN else inside & (column < inputs)[:, None]
                parts = parts + (tl.load(values + column[:, None], mask=mask, other=0.0),)
            for at in tl.static_range(COUNT):
                low, high = _nf4_to_bf16(raw[at], code, INTERPRETED)
                both = tl.join(low, high).reshape(4 * TILES, 8, 4, 2, 2, 2, 2, 2).permute(0, 5, 1, 7, 3, 4, 2, 6)
                weights = both.reshape(64 * TILES, 64).to(parts[at].dtype)
                sums += tl.dot(weights, parts[at], input_precision="ieee") * scales[at].to(tl.float32)[:, None]
        else:
            chunk = start + tl.arange(0, COUNT)
            chunk = chunk if EVEN else tl.minimum(chunk, end - 1)
            column = start * SPAN + tl.arange(0, COUNT * SPAN)
            raw = tl.load(chunks[None, :] + chunk[:, None] * 2048, eviction_policy="evict_first")
            mask = inside if EVEN else inside & (column < inputs)[:, None]
            part = tl.load(values + column[:, None], mask=mask, other=0.0)
            weights = _as_tile(raw, COUNT, TILES)
            if KIND == "fp8":  # its direct conversion to bf16 is slow
                weights = weights.to(tl.float16).to(tl.float32)
            sums = tl.dot(weights.to(part.dtype), part, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["tokens", "count", "each"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x, chunks, scale, block_scale, code, bias, out, partial, counters, tokens, inputs, outputs, count, each,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Tiles of outputs for some tokens, of `each` of their `count` chunks."""
    tile, split, splits = tl.program_id(0) * TILES, tl.program_id(1), tl.num_programs(1)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (token < tokens)[None, :]
    values = x + token.to(tl.int64)[None, :] * inputs
    byte, row = tl.arange(0, 2048 * TILES), tl.arange(0, 64 * TILES)
    first = tile.to(tl.int64) * count
    own = chunks + first * 2048 + byte // 2048 * count * 2048 + byte % 2048
    scales = block_scale
    if KIND == "nf4":
        scales = block_scale + first * 64 + row // 64 * count * 64 + row % 64
    begin = split * each
    end = tl.minimum(begin + each, count)
    wait_for_inputs(EARLY)
    sums = _tile_sums(
        own, scales, code, values, inside, begin, end, inputs, KIND, EVEN, INTERPRETED, BLOCK_M, TILES, COUNT
    )
    if SPLIT:
        SIZE: tl.constexpr = 64 * TILES * BLOCK_M
        group = tl.program_id(0) + tl.program_id(2) * tl.num_programs(0)
        cell = tl.arange(0, BLOCK_M)[None, :] * 64 * TILES + row[:, None]
        partial += group.to(tl.int64) * splits * SIZE
        tl.store(partial + split * SIZE + cell, sums, mask=inside)
        tl.debug_barrier()  # all threads have stored
        if tl.atomic_add(counters + group, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(counters + group, 0)
        sums = tl.zeros([64 * TILES, BLOCK_M], tl.float32)
        for other in tl.range(0, splits, loop_unroll_factor=128 // BLOCK_M):
            sums += tl.load(partial + other * SIZE + cell, mask=inside, other=0.0, cache_modifier=".cg")
    rows = tile * 64 + row
    within = rows < outputs
    sums *= tl.load(scale + rows, mask=within, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=within, other=0.0).to(tl.float32)[:, None]
    where = out + token.to(tl.int64)[None, :] * outputs + rows[:, None]
    mask = inside & within[:, None]
    if ADDS:
        sums += tl.load(where, mask=mask, other=0.0).to(tl.float32)
    tl.store(where, sums.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Tiling:
    """Tokens and tiles of a program, chunks at a time, stages of its loop, in how many parts the inputs are split."""

    m: int
    tiles: int
    chunks: int
    stages: int
    splits: int


def choose_tiling(tokens: int, outputs: int, chunks: int, kind: str, processors: int) -> Tiling:
    """The fastest of those tried on an H200, for matrices of a 7B model. `processors`: of the GPU."""
    m = next((size for size in (16, 32, 64) if tokens <= size), 128)
    is_nf4 = kind == "nf4"
    tiles, at_a_time, stages, programs = {
        16: (1, 4, 1, 9 if is_nf4 else 6),
        32: (1, 2 if is_nf4 else 4, 1, 9 if is_nf4 else 5),
        64: (1, 2 if is_nf4 else 4, 3, 4 if is_nf4 else 2.5),
        128: (2, 2, 3 if is_nf4 else 4, 2),
    }[m]
    splits = int(programs * processors) // triton.cdiv(outputs, _TILE * tiles)
    return Tiling(m, tiles, at_a_time, stages, min(max(1, splits), triton.cdiv(chunks, at_a_time)))


def linear(
    x_TI: Tensor, packed: Quantized, bias_O: Tensor | None = None, add_to: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """`add_to`: the outputs are added there."""
    tokens, inputs, outputs = len(x_TI), packed.inputs, packed.outputs
    if tokens > MOST_TOKENS and tiling is None:
        y_TO = F.linear(x_TI, dequantize(packed, x_TI.dtype), bias_O)
        return y_TO if add_to is None else add_to.add_(y_TO)
    count = packed.chunks.shape[1]
    tiling = tiling or choose_tiling(tokens, outputs, count, packed.kind, _processors(x_TI.device))
    out = x_TI.new_empty(tokens, outputs) if add_to is None else add_to
    tiles, groups = triton.cdiv(outputs, _TILE * tiling.tiles), triton.cdiv(tokens, tiling.m)
    each = triton.cdiv(triton.cdiv(count, tiling.splits), tiling.chunks) * tiling.chunks
    splits = triton.cdiv(count, each)
    cells = tiles * groups * splits * _TILE * tiling.tiles * tiling.m
    partial = x_TI.new_empty(cells if splits > 1 else 0, dtype=torch.float32)
    _linear_kernel[(tiles, splits, groups)](
        x_TI, packed.chunks, packed.scale_O, packed.block_scale, _code(x_TI.device), bias_O, out, partial,
        _counters(x_TI.device), tokens, inputs, outputs, count, each,
        KIND=packed.kind, HAS_BIAS=bias_O is not None, ADDS=add_to is not None,
        EVEN=inputs % (tiling.chunks * _SPAN[packed.kind]) == 0, SPLIT=splits > 1, INTERPRETED=not x_TI.is_cuda,
        BLOCK_M=tiling.m, TILES=tiling.tiles, COUNT=tiling.chunks, num_warps=4 * tiling.tiles,
        num_stages=tiling.stages, maxnreg=128 if tiling.m == 128 and packed.kind != "nf4" else None, **early_launch(),
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    chunks, scale, block_scale, code, out, inputs, outputs, count, KIND: tl.constexpr, INTERPRETED: tl.constexpr
):
    """One chunk."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    at = tile.to(tl.int64) * count + chunk
    raw = tl.load(chunks + at * 2048 + tl.arange(0, 2048))
    rows = tile * 64 + tl.arange(0, 64)
    within = rows < outputs
    factor = tl.load(scale + rows, mask=within, other=0.0)
    if KIND == "nf4":
        factor *= tl.load(block_scale + at * 64 + tl.arange(0, 64)).to(tl.float32)
        low, high = _nf4_to_bf16(raw, code, INTERPRETED)
        both = tl.join(low, high).reshape(4, 8, 4, 2, 2, 2, 2, 2).permute(0, 5, 1, 7, 3, 4, 2, 6).reshape(64, 64)
        column = chunk * 64 + tl.arange(0, 64)
        weights = both.to(tl.float32)
    else:
        column = chunk * 32 + tl.arange(0, 32)
        weights = _as_tile(raw, 1, 1).to(tl.float32)
    where = out + rows.to(tl.int64)[:, None] * inputs + column[None, :]
    mask = within[:, None] & (column < inputs)[None, :]
    tl.store(where, (weights * factor[:, None]).to(out.dtype.element_ty), mask=mask)


def dequantize(packed: Quantized, dtype: torch.dtype) -> Tensor:
    out = packed.scale_O.new_empty(packed.outputs, packed.inputs, dtype=dtype)
    _dequantize_kernel[packed.chunks.shape[:2]](
        packed.chunks, packed.scale_O, packed.block_scale, _code(out.device), out, packed.inputs, packed.outputs,
        packed.chunks.shape[1], KIND=packed.kind, INTERPRETED=not out.is_cuda,
    )  # fmt: skip
    return out
