"""QLoRA of a Qwen3-30B-A3B shape with random weights, ours within 22.5 GiB, then transformers + peft + bitsandbytes.

    python -m benchmarks.moe_h200 [--rows check,ours,ours-experts,peer-nf4,peer-bf16] [--profile]
    python -m benchmarks.moe_h200 --shape tiny --device cpu

Weights are made and quantized on the GPU, so neither host nor disk holds a model. All rows train LoRA of rank 16 on
attention (`ours-experts` at rank 8 on experts, too), on 2 × 4,096 random tokens a step, with full activation
checkpointing. bitsandbytes quantizes linear layers only: `peer-nf4` quantizes experts by its `replace_parameter_4bit`,
`peer-bf16` leaves them in bf16; both use transformers' grouped GEMMs, autocast and fused AdamW. No memory limit for
peers.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn

SHAPES = {
    "30b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 40960},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "num_experts": 8,
             "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 8192},
}  # fmt: skip
ROWS, LENGTH, RANK = 2, 4096, 16
LIMIT = 22.5  # GiB of torch memory
_GIB = 2**30


def random_model(given: argparse.Namespace, experts: str) -> Any:
    """`experts`: nf4 (ours), bnb (bitsandbytes' parametrization) or bf16. Linear layers are bitsandbytes' NF4."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from sojourn.model.experts import is_experts

    settings = {**SHAPES[given.shape], "num_hidden_layers": given.layers} if given.layers else SHAPES[given.shape]
    config = AutoConfig.for_model("qwen3_moe", **settings, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _linear_nf4(module, given.device))
        elif is_experts(module):
            _fill_experts(module, experts, given.device)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                made = torch.ones if "norm" in type(module).__name__.lower() else _random
                weight = made(parameter.shape, device=given.device, dtype=torch.bfloat16)
                setattr(module, name, nn.Parameter(weight, requires_grad=False))
    model.config.use_cache = False
    return model.to(given.device).requires_grad_(False)


def _random(shape: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).mul_(0.02)


def _linear_nf4(layer: nn.Linear, device: str) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.bfloat16,
        compress_statistics=True, quant_type="nf4", device="meta",
    )  # fmt: skip
    weight = _random(layer.weight.shape, device)
    made.weight = Params4bit(weight, compress_statistics=True, quant_type="nf4", module=made).to(device)
    return made


def _fill_experts(module: Any, experts: str, device: str) -> None:
    from sojourn.model.experts import WEIGHTS, quantize_expert_weight

    for name in WEIGHTS:
        shape = tuple(getattr(module, name).shape)
        if experts == "nf4":
            slices = (_random(shape[1:], device) for _ in range(shape[0]))
            setattr(module, name, quantize_expert_weight(slices, shape, double_quant=True))
            continue
        setattr(module, name, nn.Parameter(_random(shape, device), requires_grad=False))
        if experts == "bnb":
            from bitsandbytes.nn.parametrize import replace_parameter_4bit

            replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")


def our_step(given: argparse.Namespace, targets: str, rank: int) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
    """A network as `sojourn train` builds and resolves it; only the weights are made here."""
    from sojourn.catalog.models import find_model
    from sojourn.config.load import load_run
    from sojourn.data.artefact import Batch
    from sojourn.resolve.resolve import resolve
    from sojourn.train import build
    from sojourn.train.batcher import Batcher
    from sojourn.train.local_device import local_device
    from sojourn.train.objective.supervised import make_supervised

    spec = find_model("qwen3-30b-a3b")
    with tempfile.TemporaryDirectory() as folder:
        config = load_run([
            f"model.base={folder}", "method.kind=qlora", f"method.rank={rank}", f"method.targets={targets}",
            f"data.max_length={given.length}", "data.sources=none", f"train.global_batch={ROWS}",
            f"train.micro_batch={ROWS}", "train.steps=20", "train.activation_checkpointing=full",
            "train.precision=bf16", f"train.device={given.device}",
        ]).config  # fmt: skip
    found = resolve(config, spec, local_device(config, spec))
    train = found.config.train
    print(f"  resolved: attention {train.attention}, compile {train.compile}; planned "
          f"{found.memory.allocated / _GIB:.1f} GiB", flush=True)  # fmt: skip
    build.load_base_model = lambda *_: random_model(given, "nf4")  # type: ignore[assignment]
    network = build.bare_network(found.config, SimpleNamespace(vocab_size=1), given.device)  # type: ignore[arg-type]
    build.save_memory(network, found.config)
    build.prepare_for_steps(network, found.config)
    objective = make_supervised(found.config)
    backend, windows = network.attention_backend, network.sliding_windows
    batcher = Batcher(ROWS, given.length, 0, given.device, "bf16", backend=backend, windows=windows)
    ids = random_ids(given)
    labels = np.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    positions = np.tile(np.arange(given.length), (ROWS, 1))
    batch = Batch(ids, labels, positions, np.zeros(ids.shape, np.int32))

    def step() -> Tensor:
        with batcher.autocast():
            loss = objective.loss_sum(network, batcher.to_device(batch)) / batch.targets
        loss.backward()
        return loss.detach()

    return step, [p for p in network.model.parameters() if p.requires_grad]


def peer_step(given: argparse.Namespace, experts: str) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
    from peft import LoraConfig, get_peft_model

    model = random_model(given, experts)
    model.set_experts_implementation("grouped_mm")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)).train()
    ids = torch.from_numpy(random_ids(given)).to(given.device)

    def step() -> Tensor:
        with torch.autocast(given.device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step, [p for p in model.parameters() if p.requires_grad]


def random_ids(given: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SHAPES[given.shape]["vocab_size"], (ROWS, given.length))


def measure(name: str, made: tuple[Callable[[], Tensor], list[nn.Parameter]], given: argparse.Namespace) -> None:
    step, parameters = made
    cuda = given.device == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=cuda)
    held = torch.cuda.memory_allocated() / _GIB if cuda else 0.0
    print(f"  {sum(p.numel() for p in parameters):,} trained; {held:.2f} GiB held", flush=True)
    seconds, losses = [], []
    for number in range(given.steps):
        began = time.perf_counter()
        loss = step()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
        print(f"  step {number + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s", flush=True)
    best = statistics.median(seconds[given.steps // 3 :])
    peak = f", peak {torch.cuda.max_memory_allocated() / _GIB:.2f} GiB allocated, " if cuda else ""
    peak += f"{torch.cuda.max_memory_reserved() / _GIB:.2f} reserved" if cuda else ""
    print(f"{name}: {ROWS * given.length / best:,.0f} tok/s, {best:.3f} s a step{peak}", flush=True)
    if given.profile and cuda:
        print_profile(step)


def print_profile(step: Callable[[], Tensor]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70))


def check(device: str) -> None:
    """The kernels on this device against bitsandbytes and a loop over experts in fp64."""
    from bitsandbytes.functional import dequantize_4bit

    from sojourn.model.experts import quantize_expert_weight
    from sojourn.model.kernels import experts as kernels
    from sojourn.model.kernels.nf4 import dequantize, quantized_args

    torch.manual_seed(0)
    tokens, hidden, width, count, top = 96, 128, 64, 8, 3
    weights = [quantize_expert_weight(_random(s, device).mul_(5).unbind(), s, double_quant=True)
               for s in ((count, 2 * width, hidden), (count, hidden, width))]  # fmt: skip
    whole = []
    for weight in weights:
        state = weight.quant_state  # type: ignore[attr-defined]
        theirs = dequantize_4bit(weight.data, state)
        shape = (state.shape[0] * state.shape[1], state.shape[2])
        ours = dequantize(torch.bfloat16, weight.data, *quantized_args(state), *shape).view(state.shape)
        print(f"  dequantized: largest difference {float((ours.float() - theirs.float()).abs().max()):.2e}", flush=True)
        whole.append(theirs.double())
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    a, b = (
        torch.randn(s, device=device).mul_(0.1).requires_grad_() for s in ((count, 8, hidden), (count, 2 * width, 8))
    )
    routing = torch.randn(tokens, top, device=device).softmax(-1).requires_grad_()
    chosen = torch.rand(tokens, count, device=device).topk(top).indices
    route = kernels.sort_by_expert(chosen, routing, count)
    rows = kernels.dispatch(x, route.tokens_S, route.rows_S)
    gate_up = kernels.experts_linear(rows, route.offsets_E, weights[0], False, kernels.ExpertLora(a, b, 2.0))
    inner = kernels.weighted_swiglu(gate_up, route.weights_S)
    down = kernels.experts_linear(inner, route.offsets_E, weights[1], False)
    out = kernels.combine(down, route.tokens_S, route.rows_S, tokens)
    upstream = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, [x, a, b, routing], upstream)]
    x64, a64, b64, r64 = (t.detach().double().requires_grad_() for t in (x, a, b, routing))
    total = torch.zeros(tokens, hidden, device=device, dtype=torch.float64)
    for expert in range(count):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x64[token] @ (whole[0][expert] + 2 * b64[expert] @ a64[expert]).T).chunk(2, -1)
        y = (nn.functional.silu(gate) * up) @ whole[1][expert].T
        total = total.index_add(0, token, y * r64[token, place, None])
    expected = [total, *torch.autograd.grad(total, [x64, a64, b64, r64], upstream.double())]
    for name, one, other in zip(("output", "x", "A", "B", "routing weights"), found, expected, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        print(f"  {name}: relative error {error:.1e}{'' if error < 0.02 else '  WRONG'}", flush=True)


def rows(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "ours", lambda: our_step(given, "all-linear", RANK)
    yield "ours-experts", lambda: our_step(given, "[all-linear,experts]", RANK // 2)
    yield "peer-nf4", lambda: peer_step(given, "bnb")
    yield "peer-bf16", lambda: peer_step(given, "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="check,ours,peer-nf4,peer-bf16")
    parser.add_argument("--shape", default="30b", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--layers", type=int, help="fewer than the shape has, of all rows")
    parser.add_argument("--profile", action="store_true", help="of one step of each row")
    given = parser.parse_args()
    chosen = given.rows.split(",")
    if "check" in chosen:
        print("check", flush=True)
        check(given.device)
    for name, make in rows(given):
        if name not in chosen:
            continue
        began = time.time()
        print(f"{name}", flush=True)
        if given.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            total = torch.cuda.get_device_properties(0).total_memory
            limited = name == "ours" and given.shape == "30b"
            torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT * _GIB / total) if limited else 1.0)
        try:
            measure(name, make(), given)
        except Exception as error:
            print(f"{name}: failed: {type(error).__name__}: {' '.join(str(error).split())[:400]}", flush=True)
            if given.shape == "tiny":
                raise
        print(f"  {time.time() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
