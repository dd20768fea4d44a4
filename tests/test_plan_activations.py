"""The table of what a backward needs is what autograd really keeps, counted on a CPU."""

import numpy as np
import pytest
import torch

from sojourn.config.schema import MethodConfig
from sojourn.estimate.activations import (
    activations_outside_layers,
    saved_activations,
    saved_weight_casts,
)
from sojourn.estimate.workload import LINEAR, Workload
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.adapter import add_adapter, disable_adapter_upcast
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.layout import compute_cu_seqlens, make_layout, pad_cu_seqlens
from sojourn.model.network import wrap_model
from sojourn.resolve.config_json import spec_of_settings

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
ROWS, LENGTH, RANK = 2, 40, 8
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}


def _network(family: str, adapters: bool, targets: list[str], numbers: str, how: str):
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[family]
    sizes = SIZES if family != "qwen3_moe" else SIZES | EXPERTS
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**sizes))
    model.config.use_cache = False
    if adapters:
        model.requires_grad_(False)
        model = model if numbers == "fp32" else model.to(torch.bfloat16)
        model = add_adapter(model, MethodConfig(kind="lora", rank=RANK, targets=targets), 0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if numbers != "fp32":
            disable_adapter_upcast(model)
    network = wrap_model(model, "sdpa", torch.bfloat16 if numbers == "bf16" else None)
    apply_fused_forwards(network.base_model)
    if how != "off":
        apply_activation_checkpointing(network.base_model, how)
    network.model.train()
    return network


def _counted(network, autocast: bool) -> int:
    """Bytes of distinct storages that autograd holds after a forward, without the parameters themselves."""
    documents = np.zeros((ROWS, LENGTH), np.int32)
    ids, positions = torch.randint(0, 512, (ROWS, LENGTH)), torch.arange(LENGTH).expand(ROWS, LENGTH)
    starts = torch.from_numpy(pad_cu_seqlens(compute_cu_seqlens(documents)))
    layout = make_layout("sdpa", documents, torch.from_numpy(documents), starts, ())
    own = {parameter.untyped_storage().data_ptr() for parameter in network.model.parameters()}
    kept: dict[int, object] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), hooks:
        out = network.hidden_states(ids, positions, layout)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def _planned(work: Workload) -> float:
    """In the table's words. The ends of these models keep less than those of a whole step: no targets are chosen,
    and the tables of rotation are made once."""
    layers = work.model.layers
    ends = [row for row in activations_outside_layers(work) if row.name.startswith(("final norm", "RoPE"))]
    ends_bytes = sum(row.bytes for row in ends) if work.activation_checkpointing == "off" else sum(
        row.bytes for row in ends if row.name.startswith("final norm"))  # fmt: skip
    each = sum(row.bytes for row in saved_activations(work))
    by_autograd = work.activation_checkpointing == "off" and not work.has_plain_lora(*work.lora_targets)
    casts = layers * saved_weight_casts(work) if by_autograd else 0  # else lora_linear.py holds them
    return work.tokens * (layers * each + ends_bytes) + casts


@pytest.mark.parametrize("how", ["off", "full"])
@pytest.mark.parametrize("targets", [None, ["all-linear"], ["q_proj", "v_proj"]], ids=["all weights", "lora", "qv"])
@pytest.mark.parametrize(
    ("numbers", "family"),
    [("fp32", "qwen3"), ("bf16", "llama"), ("bf16", "qwen2"), ("fp16", "llama"), *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("fp32", "llama"), ("fp32", "qwen2"), ("bf16", "qwen3"), ("fp16", "qwen2"), ("fp16", "qwen3"))
    )],
)  # fmt: skip
def test_a_block_keeps_what_the_table_says(family, targets, how, numbers):
    """fp16 goes by autocast, for which 16-bit numbers of either kind take the same room."""
    network = _network(family, targets is not None, targets or [], numbers, how)
    wanted = LINEAR if targets in (None, ["all-linear"]) else tuple(targets)
    work = Workload(
        spec_of_settings({**SIZES, "model_type": family}, "test"), "lora" if targets else "full", ROWS, LENGTH,
        device_type="cpu", precision=numbers, compiled=False, has_triton=False, attention="sdpa",
        activation_checkpointing=how, lora_rank=RANK, lora_targets=wanted, with_evaluation=False,
    )  # fmt: skip
    found, planned = _counted(network, numbers == "fp16"), _planned(work)
    # Of adapters, the first block's input needs no gradient: its norm keeps nothing.
    planned -= work.tokens * (4 * 128 + 4) if targets and how == "off" else 0
    assert planned == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("how", ["off", "full"])
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "experts"]], ids=str)
def test_frozen_experts_keep_what_the_table_says(targets, how):
    network = _network("qwen3_moe", True, targets, "fp32", how)
    work = Workload(
        spec_of_settings({**SIZES, **EXPERTS, "model_type": "qwen3_moe"}, "test"), "lora", ROWS, LENGTH,
        device_type="cpu", precision="fp32", compiled=False, has_triton=False, attention="sdpa",
        activation_checkpointing=how,
        lora_rank=RANK, lora_targets=LINEAR if targets == ["all-linear"] else ("q_proj",),
        adapts_experts="experts" in targets, with_evaluation=False,
    )  # fmt: skip
    assert work.lora_parameters == sum(p.numel() for p in network.model.parameters() if p.requires_grad)
    assert _planned(work) == pytest.approx(_counted(network, False), rel=0.05)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_as_many_weights_are_trained_as_are_planned(targets):
    network = _network("qwen2", True, targets, "fp32", "off")
    wanted = LINEAR if targets == ["all-linear"] else tuple(targets)
    work = Workload(
        spec_of_settings({**SIZES, "model_type": "qwen2"}, "test"), "lora", lora_rank=RANK, lora_targets=wanted
    )
    real = sum(parameter.numel() for parameter in network.model.parameters() if parameter.requires_grad)
    assert work.lora_parameters == real
