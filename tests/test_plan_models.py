"""Models that a plan knows by their config.json: every parameter counted, others refused in one line."""

import json

import pytest

from conftest import called
from sojourn.errors import UserError
from sojourn.resolve.config_json import spec_of_file
from sojourn.resolve.families import stored_as
from sojourn.resolve.model_spec import base_model_spec

# As in the publishers' files.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
    "attention_bias": False, "tie_word_embeddings": False, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088, "attention_bias": True,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GLM_AIR = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "vocab_size": 151552, "attention_bias": True, "use_qk_norm": False,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
GLM = GLM_AIR | {
    "hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "first_k_dense_replace": 3, "use_qk_norm": True,
}  # fmt: skip
SCOUT = {
    "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 202048,
    },
}  # fmt: skip
MAVERICK = {**SCOUT, "text_config": {**SCOUT["text_config"], "num_local_experts": 128, "interleave_moe_layer_step": 2}}
QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip


def shape_of(folder, settings):
    (folder / "config.json").write_text(json.dumps(settings))
    return spec_of_file(folder / "config.json")


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        (DEEPSEEK_V3, 671_026_404_352),
        (GPT_OSS, 20_914_757_184),
        (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116_829_156_672),
        (QWEN3_MOE, 30_532_122_624),
        (GPT2, 124_439_808),
    ],
    ids=["DeepSeek-V3", "gpt-oss-20b", "gpt-oss-120b", "Qwen3-30B-A3B", "GPT-2"],
)
def test_every_parameter_is_counted_as_by_transformers_classes(tmp_path, settings, exact):
    shape = shape_of(tmp_path, settings)
    assert shape.parameters == exact and not shape.note


@pytest.mark.parametrize(
    ("settings", "total", "active"),
    [(DEEPSEEK_V3, 671, 37), (GPT_OSS, 20.9, 3.6), (GLM, 355, 32), (GLM_AIR, 106, 12), (SCOUT, 109, 17),
     (MAVERICK, 400, 17), (QWEN3_MOE, 30.5, 3.3)],
    ids=["DeepSeek-V3", "gpt-oss-20b", "GLM-4.5", "GLM-4.5-Air", "Scout", "Maverick", "Qwen3-30B-A3B"],
)  # fmt: skip
def test_active_parameters_are_those_of_the_model_cards(tmp_path, settings, total, active):
    """Cards round, count a vision tower or a layer for speculation, and the embedding or not."""
    shape = shape_of(tmp_path, settings)
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.015)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.09)


PLAIN = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "bert"}, "bert is an encoder"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]}, "is an encoder"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "is an encoder"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "whisper", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"model_type": "qwen3_next"}, "linear-attention"),
        ({"model_type": "newer", "layer_types": ["linear_attention", "full_attention"]}, "linear-attention"),
        ({"model_type": "clip"}, "pictures or sound"),
        ({"model_type": "qwen2_5_vl"}, "pictures or sound"),
        ({"_class_name": "UNet2DConditionModel"}, "diffusion"),
        ({"model_type": ["odd"], "architectures": 7, "layer_types": "odd"}, None),
    ],
)
def test_what_is_not_a_decoder_of_text_is_refused_in_one_line(tmp_path, changed, says):
    if says is None:
        assert shape_of(tmp_path, {**PLAIN, **changed}).parameters > 0
        return
    with pytest.raises(UserError, match=says) as found:
        shape_of(tmp_path, {**PLAIN, **changed})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "AWQ"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "GPTQ"),
        ("Qwen/Qwen3-8B-FP8", "FP8"),
        ("unsloth/Qwen2.5-7B-bnb-4bit", "bitsandbytes"),
        ("Qwen/Qwen2.5-7B-Instruct-GGUF", "GGUF"),
        ("Qwen/Qwen2.5-7B-Instruct", ""),
    ],
)
def test_quantized_bases_are_recognised(name, stored):
    assert base_model_spec(name).stored == stored_as(name) == stored


@pytest.mark.parametrize(
    ("preset", "name", "says"),
    [
        ("qlora-7b", "Qwen/Qwen2.5-7B-Instruct-AWQ", "quantized (AWQ)"),
        ("lora-20k", "unsloth/Qwen2.5-1.5B-bnb-4bit", "method.kind=qlora"),
        ("qlora-7b", "unsloth/Qwen2.5-7B-bnb-4bit", None),
        ("qlora-7b", "Qwen/Qwen2.5-7B-Instruct-GGUF", "dequantized when it is opened"),
    ],
)
def test_a_plan_says_what_its_quantized_base_means(home, preset, name, says):
    text = " ".join(called("plan", preset, f"model.base={name}", "train.steps=10", "--gpu", "4090").stdout.split())
    assert says in text if says else "quantized" not in text
