"""Memory of a served model, its weights and the KV cache in what they leave, and how fast it decodes. For the engine
and `plan --serve`."""

from __future__ import annotations

from sojourn.catalog.gpus import Gpu
from sojourn.catalog.models import ModelSpec
from sojourn.estimate.ceilings import has_rate, matmul_rate
from sojourn.estimate.constants import constants

BLOCK = 16  # tokens of a block of the KV cache
MAX_ROWS = 64  # requests at a time, unless --max-requests says otherwise
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma3_text", "glm4")  # of the builtin engine
QUANTIZATIONS = {"cuda": ("fp8", "int8", "nf4"), "cpu": ("int8",)}  # of the builtin engine
_CUDA_SHARE = 0.9  # of the memory that is free after loading
_CUDA_RESERVE = 2 << 30  # bytes for activations and CUDA graphs
_CPU_SHARE = 0.25  # of the memory that is available


def kv_memory(free: float, device: str, models: int = 1) -> int:
    """Bytes of each model's KV cache, where so many share `free` bytes after their weights are loaded."""
    if device == "cuda":
        return max(0, int(free * _CUDA_SHARE / models) - _CUDA_RESERVE)
    return int(free * _CPU_SHARE / models)


def kv_bytes_per_token(model: ModelSpec, element: int = 2) -> int:
    """Keys and values of all layers but those with linear attention; those with a sliding window keep all tokens."""
    return 2 * (model.softmax_layers or model.layers) * model.kv_heads * model.head_dim * element


def weight_bytes(model: ModelSpec, element: int = 2, quantization: str | None = None) -> int:
    """On the device. Quantized matrices have one byte a weight and an fp32 scale an output, NF4 half a byte and an fp16
    scale for 64; embeddings stay."""
    if quantization is None:
        return model.parameters * element
    matrices = model.parameters - model.embedding_parameters * (not model.tied)  # a tied LM head is packed, too
    scales = 4 * (matrices // model.hidden)  # inputs are mostly `hidden`
    size = matrices * 17 // 32 if quantization == "nf4" else matrices
    return size + scales + model.embedding_parameters * element


def users_in(kv_bytes: float, per_token: int, context: int) -> int:
    """Requests of so many tokens that a KV cache holds at a time."""
    blocks = -(-context // BLOCK)
    return int(kv_bytes // (per_token * BLOCK)) // blocks


def decode_rate(model: ModelSpec, gpu: Gpu, users: int, context: int, quantization: str | None = None) -> float | None:
    """Tokens a second of all users together, each with so many tokens in its cache; None where nothing is known."""
    if gpu.unified or not has_rate(gpu):
        return None
    decode = constants()["decode"]
    share = float(decode["quantized_share" if quantization else "share"])
    weights = weight_bytes(model, quantization=quantization) - 2 * model.embedding_parameters * (not model.tied)
    read = weights * _visited_share(model, users) + users * context * kv_bytes_per_token(model)
    computed = 2 * model.active_parameters * users / matmul_rate("bf16", gpu)
    step = max(read / (share * 1e9 * gpu.bandwidth_gbs), computed) + 1e-6 * float(decode["request_us"]) * users
    return users / step


def prefill_rate(model: ModelSpec, gpu: Gpu) -> float | None:
    """Tokens of prompts a second, by their matmuls."""
    return matmul_rate("bf16", gpu) / (2 * model.active_parameters) if has_rate(gpu) and not gpu.unified else None


def _visited_share(model: ModelSpec, users: int) -> float:
    """Of the weights, those that a step of so many tokens reads: each token visits other experts."""
    if not model.experts or not model.active_experts:
        return 1.0
    idle = (1 - model.active_experts / model.experts) ** users
    least = model.active_parameters / model.parameters
    return max(least, 1 - idle * (1 - least))
