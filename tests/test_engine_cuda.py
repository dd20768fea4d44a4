"""The engine's CUDA backend. Without a GPU its kernels run in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from sojourn.infer.engine.engine import Engine, EngineOptions
from sojourn.infer.engine.request import Request
from sojourn.infer.read_decoder import read_decoder
from sojourn.infer.sampling import Sampler, SamplingParams, SamplingRow
from test_engine import CONTEXT, prompts, tiny_model

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
OPTIONS = EngineOptions(8, 64, CONTEXT, 200)


@needs_triton
@pytest.mark.slow
def test_kernels_compute_in_tritons_interpreter_what_torch_computes() -> None:
    command = [sys.executable, str(Path(__file__).with_name("interpreted_kernels.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = ["quantized_weights", "bitsandbytes_weights", "expert_weights", "rope_of_separate_heads", "weighted_swiglu"]
    assert done.stdout.split() == [*parts, "step", "top_tokens"]


def make_engine(model: Any, quantization: str | None = None) -> Engine:
    from sojourn.infer.engine.cuda.ops import CudaOps

    ops = CudaOps(quantization)
    return Engine(read_decoder(model.to("cuda", torch.bfloat16), ops.pack, CONTEXT), ops, OPTIONS)


def logprobs(engine: Engine, requests: list[Request]) -> torch.Tensor:
    """Of all tokens of the vocabulary, at every position of the answers."""
    for request in requests:
        request.logprobs = 200
        engine.add(request)
    found: dict[str, list[torch.Tensor]] = {request.id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            for token in output.tokens:
                row = torch.empty(200)
                row[[one for one, _ in token.top]] = torch.tensor([value for _, value in token.top])
                found[output.request.id].append(row)
    assert engine.scheduler.pool.free == OPTIONS.blocks - 1
    return torch.stack([row for request in requests for row in found[request.id]])


def ask(count: int = 5, adapter: str | None = None) -> list[Request]:
    return [
        Request(f"{adapter} {at}", ids, SamplingParams(), 0, 12, adapter=adapter)
        for at, ids in enumerate(prompts(count))
    ]


def expected(model: Any, requests: list[Request]) -> torch.Tensor:
    """transformers' log probabilities of what the engine has generated."""
    rows = []
    for request in requests:
        ids = torch.tensor([[*request.prompt, *request.tokens]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].float().log_softmax(-1)
        rows.append(logits[len(request.prompt) - 1 : -1].cpu())
    return torch.cat(rows)


@needs_gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "glm4"])
def test_log_probabilities_are_as_near_as_transformers_own_in_bf16(kind: str) -> None:
    """Prompts in pieces, graphs of several sizes; the reference is fp32 with the same weights."""
    requests = ask()
    found = logprobs(make_engine(tiny_model(kind)), requests)
    exact = expected(tiny_model(kind).to("cuda", torch.bfloat16).float(), requests)
    theirs = expected(tiny_model(kind).to("cuda", torch.bfloat16), requests)
    error, usual = (found - exact).abs().mean(), (theirs - exact).abs().mean()
    assert error < 1.5 * usual + 1e-3, (float(error), float(usual))


@needs_gpu
@pytest.mark.parametrize("quantization", ["fp8", "int8", "nf4"])
def test_quantized_weights_are_multiplied_exactly(quantization: str) -> None:
    """As near to fp32 over the dequantized weights as bf16 is."""
    from sojourn.model.kernels.quantized_linear import dequantize, quantize

    requests, model = ask(), tiny_model("llama").to("cuda", torch.bfloat16)
    found = logprobs(make_engine(tiny_model("llama"), quantization), requests)
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    model = model.float()
    for layer in layers:
        layer.weight.data = dequantize(quantize(layer.weight.data, quantization), torch.float32)
    error = (found - expected(model, requests)).abs().mean()
    assert error < 0.02, float(error)


@needs_gpu
def test_adapters_in_graphs_compute_what_they_do_without(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(tiny_model("qwen2"), LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    adapted.save_pretrained(tmp_path / "one")
    engine = make_engine(tiny_model("qwen2"))
    engine.load_adapter("one", tmp_path / "one")
    requests = [*ask(), *ask(3, "one")]
    found = logprobs(engine, requests)
    assert {adapted for _, adapted in engine._forward._graphs} == {True}
    base, merged = tiny_model("qwen2"), PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path / "one")
    exact = torch.cat([expected(base.cuda(), requests[:5]), expected(merged.cuda(), requests[5:])])
    assert (found - exact).abs().mean() < 0.05
    engine.unload_adapter("one")  # its graphs go, too
    engine.load_adapter("two", tmp_path / "one")
    again = logprobs(engine, ask(3, "two"))
    assert (again - found[-len(again) :]).abs().mean() < 0.05


@needs_gpu
def test_top_k_and_top_p_keep_on_the_gpu_what_they_keep_on_the_cpu() -> None:
    from sojourn.infer.top_tokens import keep_top

    params = [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 200, "top_p": 0.5}, {}]
    rows = [SamplingRow(SamplingParams(temperature=1.0, **one), [], 0) for one in params]
    cpu, gpu = Sampler(rows, 152_064, "cpu"), Sampler(rows, 152_064, "cuda")
    for scale in (1.0, 4.0):
        probs = (scale * torch.randn(4, 152_064)).softmax(-1)
        kept, ids = cpu._most_likely(probs)
        wanted = torch.zeros_like(probs).scatter_(1, ids, kept) > 0
        found = keep_top(probs.cuda(), gpu._top_k, gpu._top_p).cpu() > 0
        assert ((found != wanted).sum(1) <= 2).all()  # sums are rounded elsewhere
        assert torch.equal(found[1], wanted[1]) and found[3].all()
