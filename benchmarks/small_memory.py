"""Memory and speed of LoRA and QLoRA of a large shape with random weights: tok/s, peak, MFU. One case per call.

    python benchmarks/small_memory.py qwen2.5-7b qlora --checkpointing offload --rows 2 --length 4096
    python benchmarks/small_memory.py llama-3.1-8b qlora --length 90000 --documents one --cap 22.5 --steps 3

The model is made on the GPU, layer by layer, so that neither host nor disk needs room for it. Tokens are random; packed
documents have about 480 tokens. MFU as (6·N + 12·L·D·T)·tok/s over the card's 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from sojourn.config.schema import MethodConfig, TrainConfig
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.adapter import disable_adapter_upcast, with_adapter
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.layers import compile_layers
from sojourn.model.layout import compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.loss import cross_entropy_sum
from sojourn.model.network import Network, wrap_model
from sojourn.train.optim.optimizers import Optimizer

SHAPES = {
    "qwen2.5-7b": ("Qwen2", 3584, 18944, 28, 28, 4, 152064),
    "llama-3.1-8b": ("Llama", 4096, 14336, 32, 32, 8, 128256),
}
_DOCUMENT = 480
_PEAK_FLOPS = 989e12


def make_model(shape: str, quantized: bool) -> Any:
    import transformers

    family, hidden, ffn, layers, heads, kv_heads, vocab = SHAPES[shape]
    config = getattr(transformers, f"{family}Config")(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=False, max_position_embeddings=2**19,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not list(child.children()):
                setattr(parent, name, _real(child, quantized and name != "lm_head"))
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
    return model


def _real(module: Any, quantized: bool) -> Any:
    """The same leaf module with random weights on the GPU; linear layers in NF4 if `quantized`."""
    module = module.to_empty(device="cuda")
    for name, weight in module.named_parameters(recurse=False):
        weight.data.fill_(1.0) if weight.ndim == 1 and name == "weight" else weight.data.normal_(0, 0.02)
    if not (quantized and isinstance(module, torch.nn.Linear)):
        return module
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(
        module.in_features, module.out_features, module.bias is not None, compute_dtype=torch.bfloat16,
        compress_statistics=True, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
    ).to("cuda")
    if module.bias is not None:
        layer.bias = torch.nn.Parameter(module.bias.data, requires_grad=False)
    return layer


def make_network(args: argparse.Namespace) -> Network:
    model = make_model(args.shape, args.method == "qlora")
    method = MethodConfig(kind=args.method, rank=args.rank)
    model = with_adapter(model, method, 0)
    disable_adapter_upcast(model)
    network = wrap_model(model, "varlen", torch.bfloat16)
    apply_fused_forwards(network.base_model)
    if args.checkpointing != "off":
        apply_activation_checkpointing(network.base_model, args.checkpointing, preserve_rng_state=False)
    if args.compile:
        compile_layers(network.base_model)
    network.model.train()
    return network


def make_batch(args: argparse.Namespace, vocab: int) -> tuple[Any, ...]:
    tokens = np.arange(args.length)
    if args.documents == "one":
        documents, positions = np.zeros_like(tokens), tokens
    else:
        documents, positions = tokens // _DOCUMENT, tokens % _DOCUMENT
    documents = np.tile(documents, (args.rows, 1)).astype(np.int32)
    cu_seqlens = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(documents))).cuda()
    layout = make_layout("varlen", documents, torch.from_numpy(documents).cuda(), cu_seqlens, ())
    ids = torch.randint(vocab, (args.rows, args.length), device="cuda")
    return ids, torch.from_numpy(np.tile(positions, (args.rows, 1))).cuda(), layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("method", choices=("lora", "qlora"))
    parser.add_argument("--checkpointing", default="offload")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--documents", choices=("packed", "one"), default="packed")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--cap", type=float, help="GiB that torch may take")
    args = parser.parse_args()
    if args.cap:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap * 2**30 / total)
    network = make_network(args)
    loaded = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = Optimizer(network.model, TrainConfig(optimizer=args.optimizer), "cuda")
    optimizer.set_learning_rate(1e-4)
    _, hidden, _, layers, _, _, vocab = SHAPES[args.shape]
    ids, positions, layout = make_batch(args, vocab)
    labels = ids.roll(-1, 1).flatten()
    times, losses = [], []
    for step in range(args.warmup + args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        states = network.hidden_states(ids, positions, layout).flatten(0, 1)
        loss = cross_entropy_sum(network.lm_head, states, labels) / labels.numel()
        del states
        loss.backward()
        optimizer.torch.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        if args.length > 20_000 or step < 1:
            print(
                f"step {step}: {times[-1]:.2f} s, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True
            )
    seconds = sorted(times[args.warmup :])[len(times[args.warmup :]) // 2]
    rate = labels.numel() / seconds
    parameters = sum(p.numel() for p in network.model.parameters()) if args.method == "lora" else None
    parameters = {"qwen2.5-7b": 7.615e9, "llama-3.1-8b": 8.03e9}[args.shape] if parameters is None else parameters
    span = args.length if args.documents == "one" else _DOCUMENT
    found = {
        **{key: value for key, value in vars(args).items() if value is not None},
        "tok/s": round(rate),
        "MFU": round((6 * parameters + 12 * layers * hidden * span) * rate / _PEAK_FLOPS, 3),
        "loaded GiB": round(loaded / 2**30, 2),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "first loss": losses[0],
        "last loss": losses[-1],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
