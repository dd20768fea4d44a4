"""What vLLM refuses, or serves otherwise than it was trained, said before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sojourn.errors import UserError
from sojourn.infer.adapter_weights import AdapterWeights
from sojourn.infer.runtimes.transformers_tokenizer import without_own_code
from sojourn.infer.runtimes.vllm import CPU_HEAD_SIZES, head_size, lora_rank, max_lora_rank
from sojourn.infer.weight_source import WeightSource, is_tied
from sojourn.storage.files import read_json_object

# Models that vLLM has an implementation of its own for; others it runs through transformers, if at all
KNOWN_ARCHITECTURES = frozenset(
    (
        "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration", "PhiForCausalLM", "Phi3ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM",
        "SmolLM3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM",
        "StableLmForCausalLM", "Starcoder2ForCausalLM", "FalconForCausalLM", "CohereForCausalLM",
        "GraniteForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
    )
)  # fmt: skip
_MERGE = "merge it instead: --to vllm"
_ENDS = ("embed_tokens", "lm_head", "wte")
_REFUSED_SETTINGS = {
    "use_dora": "DoRA", "lora_bias": "biases in its LoRA layers", "alora_invocation_tokens": "Activated LoRA",
    "layer_replication": "layer_replication", "use_qalora": "QALoRA", "use_bdlora": "block-diagonal LoRA",
    "trainable_token_indices": "trained tokens (trainable_token_indices)", "target_parameters": "target_parameters",
}  # fmt: skip


def refuse(problems: Iterator[str], what: str = "--to vllm") -> None:
    """One line: the first problem, and how many more there are."""
    found = list(problems)
    if found:
        more = f" (and {len(found) - 1} more of this kind)" if len(found) > 1 else ""
        raise UserError(f"{what}: {found[0]}{more}")


def model_problems(weights: WeightSource) -> Iterator[str]:
    """Of a merged model."""
    config, names = weights.config, weights.names()
    if "quantization_config" in config:
        yield "its weights are quantized already; name the 16-bit model"
    size = head_size(config)
    if size and (size > 512 or (size < 32 and size % 8)):
        yield f"head_dim is {size}; vLLM's attention takes multiples of 8 and sizes from 32 to 512"
    if not is_tied(config) and not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in names):
        yield "config.json says that the LM head is not tied to the embedding, but there is no lm_head.weight"
    embedding = next((name for name in names if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    rows, said = weights.shape(embedding)[0] if embedding else 0, (config.get("text_config") or config)["vocab_size"]
    if embedding and rows != said:
        yield f"the embedding has {rows:,} rows, but config.json says vocab_size {said:,}"
    yield from _tokenizer_problems(weights.tokenizer_folder, int(said))


def _tokenizer_problems(folder: Path, vocab_size: int) -> Iterator[str]:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        yield f"{folder} has no tokenizer (tokenizer.json or tokenizer.model)"
        return
    highest = _highest_id(folder)
    if highest >= vocab_size:
        yield f"the tokenizer has ids up to {highest:,}, but the embedding only {vocab_size:,} rows"


def _highest_id(folder: Path) -> int:
    """0 where only a SentencePiece model tells."""
    found = read_json_object(folder / "tokenizer.json")
    vocabulary = (found.get("model") or {}).get("vocab") or {}
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    added = [one.get("id") for one in found.get("added_tokens") or [] if isinstance(one, dict)]
    return max((one for one in [*ids, *added] if type(one) is int), default=0)


def model_notes(weights: WeightSource, template: bool) -> Iterator[str]:
    """What works, but not everywhere or not as one might expect."""
    config = weights.config
    architecture = next(iter(config.get("architectures") or [""]), "")
    if architecture not in KNOWN_ARCHITECTURES:
        name = architecture or config.get("model_type")
        yield f"vLLM has no {name} of its own; it runs it through transformers, if at all"
    size = head_size(config)
    if size not in CPU_HEAD_SIZES:
        allowed = ", ".join(map(str, CPU_HEAD_SIZES))
        yield f"head_dim is {size}, so vLLM serves it on a GPU only; on a CPU it takes {allowed}"
    if not template:
        yield "the model has no chat template, so vLLM answers /v1/completions only, not /v1/chat/completions"
    if config.get("dtype", config.get("torch_dtype")) == "float32":
        yield "the weights are fp32, which vLLM rounds to bf16 on a GPU unless it is started with --dtype float32"


def adapter_problems(adapter: AdapterWeights, vocab_size: int, tokenizer_folder: Path) -> Iterator[str]:
    config = adapter.config
    for key, what in _REFUSED_SETTINGS.items():
        if config.get(key):
            yield f"vLLM takes no adapter with {what}; {_MERGE}"
    if config.get("bias", "none") != "none":
        yield f"vLLM takes no adapter with trained biases (bias={config['bias']}); {_MERGE}"
    if adapter.saved():
        yield f"vLLM takes no adapter with whole layers in it (modules_to_save: {adapter.saved()[0]}); {_MERGE}"
    ends = [name for name in adapter.modules() if any(end in name for end in _ENDS)]
    if ends:
        yield f"vLLM takes no adapter on the embedding or the LM head ({ends[0]}); {_MERGE}"
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in ("gaussian", "eva", "orthogonal"):
        yield f"vLLM takes no adapter that began with {start}, which changes the base; {_MERGE}"
    if max_lora_rank(lora_rank(config)) is None:
        yield f"its rank is {lora_rank(config)}, and vLLM takes at most 512; {_MERGE}"
    highest = _highest_id(tokenizer_folder)
    if highest >= vocab_size:
        yield f"its tokenizer has new tokens (ids up to {highest:,}; the base has {vocab_size:,}); {_MERGE}"


def config_for_vllm(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the older spellings beside the newer ones: a vLLM with transformers 4 reads only those, and
    would silently take another RoPE base."""
    found = {**config, "torch_dtype": config.get("dtype")}
    text = found.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {**text, **_older_rope(text)}
    return {**found, **_older_rope(found)}


def _older_rope(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention")
    older = {"rope_theta": full["rope_theta"]} if "rope_theta" in full else {}
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    older["rope_scaling"] = scaling if full.get("rope_type", "default") != "default" else None
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    return older


def tokenizer_for_vllm(settings: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: transformers 4 does not know the class names of transformers 5."""
    settings = without_own_code(settings)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        return {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    return settings
