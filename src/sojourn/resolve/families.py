"""What a config.json describes, by transformers' `model_type`: models that cannot be planned, with the reason, and how
weights are stored."""

from __future__ import annotations

import re
from typing import Any

from sojourn.config.messages import printable
from sojourn.errors import UserError

_NAME = "; name a language model, such as model.base=qwen2.5-7b"
_MEASURE = "; plans are for attention in every layer: sojourn rehearse measures such a model on the GPU itself"
_ENCODERS = {
    *("albert", "bert", "big_bird", "camembert", "convbert", "deberta", "deberta-v2", "distilbert", "electra"),
    *("ernie", "esm", "eurobert", "flaubert", "funnel", "ibert", "layoutlm", "layoutlmv3", "longformer"),
    *("megatron-bert", "mobilebert", "modernbert", "mpnet", "new", "nomic_bert", "nystromformer", "rembert"),
    *("roberta", "roformer", "squeezebert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
}
_ENCODER_DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5"),
    *("m2m_100", "marian", "mbart", "moonshine", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart"),
    *("prophetnet", "seamless_m4t", "speech_to_text", "switch_transformers", "t5", "t5gemma", "umt5", "whisper"),
}
_STATE_SPACE = {
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("mamba", "mamba2", "minimax", "nemotron_h", "plamo2", "qwen3_next", "recurrent_gemma", "rwkv", "rwkv6"),
    *("rwkv7", "xlstm", "zamba", "zamba2"),
}
_SEES = {
    *("align", "aria", "bark", "beit", "blip", "blip-2", "chameleon", "chinese_clip", "clap", "clip", "clipseg"),
    *("convnext", "convnextv2", "deepseek_vl", "deepseek_vl_v2", "deit", "detr", "dinov2", "dinov3_vit", "emu3"),
    *("encodec", "florence2", "fuyu", "git", "glm4v", "glm4v_moe", "hubert", "idefics", "idefics2", "idefics3"),
    *("instructblip", "internvl", "internvl_chat", "janus", "kosmos-2", "llava", "llava_next", "llava_onevision"),
    *("minicpmv", "mllama", "molmo", "musicgen", "ovis", "paligemma", "phi3_v", "phi4_multimodal", "pixtral"),
    *("qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"),
    *("resnet", "sam", "segformer", "siglip", "siglip2", "smolvlm", "speecht5", "swin", "trocr", "vilt"),
    *("vision-encoder-decoder", "vit", "vit_mae", "wav2vec2"),
}
_LAYERS_OF_STATES = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "lightning_attention", "hybrid"}
_STATE_KEYS = {"ssm_state_size", "mamba_d_state", "ssm_cfg"}
_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
          "ForImageClassification", "ForMultipleChoice")  # fmt: skip
# By a word of a model's name or `quant_method` in its file.
_STORED = {
    "awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "int4": "int4", "int8": "int8", "w4a16": "int4", "w8a8": "int8",
    "mxfp4": "MXFP4", "nvfp4": "NVFP4", "hqq": "HQQ", "exl2": "EXL2", "exl3": "EXL3", "aqlm": "AQLM", "mlx": "MLX",
    "gguf": "GGUF", "bnb": "bitsandbytes", "4bit": "bitsandbytes", "8bit": "bitsandbytes",
    "bitsandbytes": "bitsandbytes", "compressed": "compressed-tensors",
}  # fmt: skip
_DEQUANTIZED = ("GGUF", "compressed-tensors", "MXFP4")  # when they are opened


def check_trainable(settings: dict[str, Any], where: str) -> None:
    """Refuses, in one line, what is not a decoder of text with attention in every layer."""
    family = str(settings.get("model_type") or "")
    kind = printable(family, 60)
    if "_class_name" in settings or "block_out_channels" in settings:
        raise UserError(f"{where}: a part of a diffusion model, which generates no text{_NAME}")
    if family in _ENCODER_DECODERS or settings.get("is_encoder_decoder") is True:
        raise UserError(f"{where}: {kind or 'this'} is an encoder-decoder model, and Sojourn trains decoders{_NAME}")
    named = settings.get("architectures")
    heads = [printable(one, 60) for one in named if str(one).endswith(_HEADS)] if isinstance(named, list) else []
    if family in _ENCODERS or heads:
        raise UserError(f"{where}: {heads[0] if heads else kind} is an encoder and generates no text{_NAME}")
    if family in _SEES:
        raise UserError(f"{where}: {kind} is for pictures or sound, and Sojourn trains on text{_NAME}")
    layers = settings.get("layer_types") or settings.get("layers_block_type")
    kinds = {one for one in layers if isinstance(one, str)} if isinstance(layers, list) else set()
    if family in _STATE_SPACE or kinds & _LAYERS_OF_STATES or _STATE_KEYS & settings.keys():
        raise UserError(f"{where}: {kind or 'this'} has state-space or linear-attention layers{_MEASURE}")


def stored_as(word: object) -> str:
    """How a model's weights are stored, by its name or the `quant_method` of its file; empty where they are plain."""
    if not isinstance(word, str):
        return ""
    last = re.split(r"[/\\]", word.strip().rstrip("/\\"))[-1].lower()
    parts = re.split(r"[\s\-_:.]+", last)
    return next((_STORED[part] for part in parts if part in _STORED), "")


def describe_stored(stored: str, method: str) -> str | None:
    """What to know of a base whose weights are quantized."""
    if not stored:
        return None
    if stored == "MXFP4" and method == "qlora":
        return "the base's experts are stored in MXFP4 and stay so; planned as NF4, which takes 3 % less"
    if stored in _DEQUANTIZED:
        return f"the base is stored as {stored} and dequantized when it is opened; planned so"
    if stored == "bitsandbytes" and method == "qlora":
        return None  # as QLoRA makes it
    fix = "method.kind=qlora, or train" if stored == "bitsandbytes" else "train"
    return f"the base is quantized ({stored}), and this plan is for its original weights: {fix} on the original model"
