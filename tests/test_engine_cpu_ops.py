"""The engine's CPU backend computes what torch computes, and a row's result never depends on the rest of the batch."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.cpu import ops as ops_module
from sojourn.infer.engine.cpu.ops import CpuOps
from sojourn.infer.engine.cpu.smoke_test import open_cpu_ops
from sojourn.machine.probe_software import find_gcc
from sojourn.model.kernels.cpu import compile_c

pytestmark = pytest.mark.skipif(find_gcc() is None, reason="no gcc, or not Linux")
KINDS = ("fp32", "bf16", "int8")


def _matrix(outputs: int, inputs: int, kind: str) -> tuple[CpuOps, torch.Tensor]:
    weight = torch.randn(outputs, inputs) / inputs**0.5
    return CpuOps("int8" if kind == "int8" else None), weight.bfloat16().float() if kind == "bf16" else weight


def _near(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert torch.linalg.vector_norm(found - expected) <= error * torch.linalg.vector_norm(expected)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> None:
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    ops_module.load_library()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _shapes(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Rows, inputs, outputs; few are multiples of a tile, some of the sizes that the C file treats differently."""
    draw = random.Random(seed)
    fixed = [(1, 1, 1), (12, 576, 64), (13, 256, 33), (97, 1536, 31), (200, 769, 95), (40, 2048, 40)]
    return fixed + [(draw.randint(1, 120), draw.randint(1, 900), draw.randint(1, 200)) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_torchs(kind):
    for rows, inputs, outputs in _shapes(12):
        torch.manual_seed(rows)
        ops, weight = _matrix(outputs, inputs, kind)
        x, bias = torch.randn(rows, inputs), torch.randn(outputs)
        packed = ops.pack(weight)
        if kind == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            assert ((weight - (weight / scale).round() * scale).abs() <= 0.5001 * scale).all()
            weight = (weight / scale).round() * scale
        _near(
            ops.linear(x, packed, bias),
            F.linear(x.double(), weight.double(), bias.double() if bias is not None else None).float(),
        )
        total = torch.randn(rows, outputs)
        expected = total + ops.linear(x, packed, bias)
        ops.linear_add_(total, x, packed, bias)
        _same_bits(total, expected)
        norm = torch.randn(inputs)
        normed = ops.linear(ops.rms_norm(x, norm, 1e-5), packed, bias)
        _same_bits(ops.norm_linear(x, norm, 1e-5, packed, bias), normed)
        if outputs % 2 == 0:
            gated = ops.gated_act(ops.linear(ops.rms_norm(x, norm, 1e-5), packed), "gelu_tanh")
            _same_bits(ops.norm_gated(x, norm, 1e-5, packed, "gelu_tanh"), gated)


def test_weights_that_are_bf16_lose_nothing_and_take_half_the_memory():
    ops, weight = _matrix(70, 130, "bf16")
    packed, x = ops.pack(weight), torch.randn(5, 130)
    assert packed.panels.element_size() == 2 and ops.pack(weight.bfloat16()).panels.equal(packed.panels)
    changed = weight.clone()
    changed[0, 0] = 0.1
    fp32 = ops.pack(changed)
    assert fp32.panels.element_size() == 4
    _same_bits(ops.linear(x, packed)[:, 1:], ops.linear(x, fp32)[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
def test_linear_of_a_row_depends_on_that_row_alone(kind, threads):
    for rows, inputs, outputs in _shapes(6, seed=1):
        torch.manual_seed(rows)
        ops, weight = _matrix(outputs, inputs, kind)
        x, packed = torch.randn(rows, inputs), ops.pack(weight)
        together = ops.linear(x, packed)
        for count, sizes in ((1, (1, 5, 17)), (2, (12, 32, rows))):
            threads(count)
            for size in sizes:
                _same_bits(torch.cat([ops.linear(part, packed) for part in x.split(size)]), together)


def test_norms_and_activations_are_torchs_and_row_by_row_the_same(threads):
    ops = CpuOps()
    for rows, size in ((1, 576), (3, 37), (64, 1536), (300, 576)):
        x, weight = torch.randn(rows, size), torch.randn(size)
        _near(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5))
        gate_up = 4 * torch.randn(rows, 2 * size)
        gate, up = gate_up.chunk(2, -1)
        _near(ops.gated_act(gate_up, "silu"), F.silu(gate) * up)
        _near(ops.gated_act(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)
        threads(2)
        rows_alone = [ops.rms_norm(row, weight, 1e-5) for row in x.split(1)]
        _same_bits(torch.cat(rows_alone), ops.rms_norm(x, weight, 1e-5))
        for act in ("silu", "gelu_tanh"):
            rows_alone = [ops.gated_act(row, act) for row in gate_up.split(1)]
            _same_bits(torch.cat(rows_alone), ops.gated_act(gate_up, act))
        threads(1)


def test_activations_hold_at_the_ends_of_their_range():
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, float("inf"), float("nan")]])
    found = CpuOps().gated_act(torch.cat((gate, torch.ones_like(gate)), 1), "silu")
    torch.testing.assert_close(found[:, 1:], F.silu(gate)[:, 1:], equal_nan=True, atol=1e-20, rtol=1e-6)


def _spec(heads=9, kv_heads=3, head_dim=64, window=None, rotary=None, normed=False):
    rotary = head_dim if rotary is None else rotary
    angles = torch.arange(700)[:, None] / 100 ** (torch.arange(rotary // 2) / max(1, rotary // 2))
    norms = [1 + 0.1 * torch.randn(head_dim) if normed else None for _ in range(2)]
    return SimpleNamespace(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, window=window, rotary_dim=rotary,
        cos_PR=angles.cos() if rotary else None, sin_PR=angles.sin() if rotary else None,
        q_norm_D=norms[0], k_norm_D=norms[1], eps=1e-6,
    )  # fmt: skip


class _Sequences:
    """Several sequences' qkv, and a cache with their blocks in random order; `run` computes parts of them in a step."""

    def __init__(self, spec, lengths: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.ops, self.spec, self.lengths = CpuOps(), spec, lengths
        self.qkv = [torch.randn(length, (spec.heads + 2 * spec.kv_heads) * spec.head_dim) for length in lengths]
        counts = [-(-length // BLOCK) for length in lengths]
        self.table = [part.tolist() for part in (1 + torch.randperm(sum(counts))).split(counts)]
        self.cache = self.ops.new_cache(1 + sum(counts), spec, torch.float32, torch.device("cpu"))
        for tensor in self.cache:  # what nobody has written must not be read
            tensor[..., : spec.head_dim if tensor is self.cache[1] else None].fill_(float("nan"))

    def run(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """`parts`: sequence, first and last position."""
        positions = torch.cat([torch.arange(first, end) for _, first, end in parts])
        slots = [self.table[s][at // BLOCK] * BLOCK + at % BLOCK for s, first, end in parts for at in range(first, end)]
        width = max(len(self.table[s]) for s, _, _ in parts)
        sizes = [end - first for _, first, end in parts]
        batch = SimpleNamespace(
            positions_T=positions.int(),
            slots_T=torch.tensor(slots, dtype=torch.int32),
            starts_S1=torch.tensor([0, *sizes]).cumsum(0).int(),
            context_S=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            block_table_SB=torch.tensor(
                [self.table[s] + [0] * (width - len(self.table[s])) for s, _, _ in parts], dtype=torch.int32
            ),
        )
        qkv = torch.cat([self.qkv[s][first:end] for s, first, end in parts])
        query = self.ops.rope_store(qkv, self.cache, batch, self.spec)
        return list(self.ops.attention(query, self.cache, batch, self.spec).split(sizes))

    def expected(self, sequence: int) -> torch.Tensor:
        spec, length = self.spec, self.lengths[sequence]
        heads = self.qkv[sequence].double().view(length, -1, spec.head_dim)
        query, key, value = heads.split((spec.heads, spec.kv_heads, spec.kv_heads), 1)
        query, key = (self._rotated(x, norm) for x, norm in ((query, spec.q_norm_D), (key, spec.k_norm_D)))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (spec.window or length))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1).float()

    def _rotated(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        spec, half = self.spec, self.spec.rotary_dim // 2
        if norm is not None:
            x = F.rms_norm(x, (spec.head_dim,), norm.double(), spec.eps)
        if not half:
            return x
        cos, sin = (table[: len(x), None].double() for table in (spec.cos_PR, spec.sin_PR))
        first, second = x[..., :half], x[..., half : 2 * half]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), -1)


SPECS = {
    "smollm2": {},
    "head_dim 32, no GQA": {"heads": 4, "kv_heads": 4, "head_dim": 32},
    "head_dim 80, partial rotary": {"heads": 4, "kv_heads": 2, "head_dim": 80, "rotary": 32},
    "head_dim 96, window": {"heads": 6, "kv_heads": 2, "head_dim": 96, "window": 40},
    "head_dim 128, q/k norm": {"heads": 8, "kv_heads": 2, "head_dim": 128, "normed": True},
    "head_dim 256, MQA": {"heads": 3, "kv_heads": 1, "head_dim": 256},
    "long window, no rotary": {"heads": 2, "kv_heads": 1, "head_dim": 20, "window": 270, "rotary": 0},
    "group larger than a tile": {"heads": 28, "kv_heads": 2, "head_dim": 32, "window": 17},
}


@pytest.mark.parametrize("name", SPECS)
def test_attention_is_torchs(name):
    sequences = _Sequences(_spec(**SPECS[name]), [1, 16, 33, 290, 530])
    for sequence, found in enumerate(sequences.run([(s, 0, n) for s, n in enumerate(sequences.lengths)])):
        _near(found, sequences.expected(sequence))


@pytest.mark.parametrize("name", SPECS)
def test_attention_of_a_token_depends_neither_on_the_batch_nor_on_chunks_nor_on_threads(name, threads):
    lengths, draw = [1, 40, 290, 530], random.Random(name)
    threads(2)
    whole = _Sequences(_spec(**SPECS[name]), lengths)
    expected = whole.run([(s, 0, n) for s, n in enumerate(lengths)])
    for attempt in range(3):
        threads(1 + attempt % 2)
        again, done, found = _Sequences(whole.spec, lengths), [0] * len(lengths), [[] for _ in lengths]
        again.qkv = whole.qkv
        while done != lengths:  # some sequences go on by some tokens, often by one, as in decode
            going = [s for s, n in enumerate(lengths) if done[s] < n and draw.random() < 0.7]
            steps = [draw.choice((1, 1, 7, 64, 300)) for _ in going]
            parts = [(s, done[s], min(lengths[s], done[s] + n)) for s, n in zip(going, steps, strict=True)]
            if not parts:
                continue
            for (s, _, end), out in zip(parts, again.run(parts), strict=True):
                found[s].append(out)
                done[s] = end
        for out, parts in zip(expected, found, strict=True):
            _same_bits(torch.cat(parts), out)


def test_nan_in_one_sequence_stays_there():
    lengths, spec = [20, 300, 33], _spec()
    good, bad = _Sequences(spec, lengths), _Sequences(spec, lengths)
    bad.qkv[1].fill_(float("nan"))
    parts = [(s, 0, n) for s, n in enumerate(lengths)]
    expected, found = good.run(parts), bad.run(parts)
    assert found[1].isnan().all()
    for s in (0, 2):
        _same_bits(found[s], expected[s])


def test_a_step_without_rows_is_no_special_case():
    ops, weight = _matrix(8, 6, "fp32")
    packed, nothing = ops.pack(weight), torch.empty(0, 6)
    assert ops.linear(nothing, packed).shape == ops.norm_linear(nothing, torch.ones(6), 1e-5, packed).shape == (0, 8)
    assert ops.norm_gated(nothing, torch.ones(6), 1e-5, packed, "silu").shape == (0, 4)


def test_other_dtypes_and_shapes_are_refused():
    ops, weight = _matrix(8, 8, "fp32")
    packed = ops.pack(weight)
    with pytest.raises(TypeError, match="float32"):
        ops.linear(torch.randn(2, 8).bfloat16(), packed)
    with pytest.raises(TypeError, match="contiguous"):
        ops.linear(torch.randn(8, 2).t(), packed)
    with pytest.raises(ValueError, match="9 inputs"):
        ops.linear(torch.randn(2, 9), packed)


def test_kernels_that_cannot_be_compiled_or_are_wrong_are_not_used(monkeypatch, capsys):
    assert open_cpu_ops() is not None and open_cpu_ops("int8") is not None and not capsys.readouterr().err
    norm = CpuOps.rms_norm
    monkeypatch.setattr(CpuOps, "rms_norm", lambda *args: norm(*args) * 1.001)
    assert open_cpu_ops() is None and "(elementwise); using torch's" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(compile_c, "find_gcc", lambda: None)
    ops_module.load_library.cache_clear()
    assert open_cpu_ops() is None
    ops_module.load_library.cache_clear()
    said = capsys.readouterr().err
    assert "no gcc" in said and "may depend on the batch" in said and said.count("\n") == 1
