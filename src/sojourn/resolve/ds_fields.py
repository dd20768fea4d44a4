"""The fields of a DeepSpeed file by their dotted names, each in one table that says how it is handled."""

from __future__ import annotations

from typing import Any, Literal

Fields = dict[str, Any]
Kind = Literal["flag", "size", "count", "number"] | tuple[int, ...] | tuple[str, ...]

_DTYPES = ("fp32", "fp16", "bf16")
_DEVICES = ("none", "cpu", "nvme")

# Must equal this key of `train`.
TRAIN_KEYS = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_clipping": "clip",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.cos_min_ratio": "min_lr",
}
# Checked against several keys or fields together, each by a function in `ds_config.py`.
COMPARED_TOGETHER = (
    "gradient_accumulation_steps",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.type",
    "optimizer.params.betas",
    "scheduler.type",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
)
# Must have this value.
FIXED: Fields = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_predivide_factor": 1,
    "optimizer.legacy_fusion": False,
    "optimizer.params.eps": 1e-8,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.bias_correction": True,
    "optimizer.params.amsgrad": False,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_min_ratio": 0,
    "scheduler.params.warmup_type": "linear",
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.offload_optimizer.ratio": 1,
}


def _table(groups: dict[Any, str], above: str = "") -> dict[str, Any]:
    """Field to value, from value to the names of its fields."""
    return {above + field: shared for shared, fields in groups.items() for field in fields.split()}


# Passed to DeepSpeed unchanged; the value is the type that the field takes.
PASSED_THROUGH: dict[str, Kind] = {
    **_table({_DTYPES: "communication_data_type data_types.grad_accum_dtype"}),
    **_table(
        {
            "number": "fp16.loss_scale",
            "size": "fp16.initial_scale_power",
            "count": "fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale",
            "flag": "fp16.consecutive_hysteresis bf16.immediate_grad_update",
        }
    ),
    **_table(
        {
            (0, 1, 2, 3): "stage",
            _DEVICES: "offload_optimizer.device offload_param.device",
            "count": "reduce_bucket_size sub_group_size",
            "size": "allgather_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
            "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
            "stage3_module_granularity_threshold offload_optimizer.buffer_count offload_param.buffer_count "
            "offload_param.buffer_size offload_param.max_in_cpu",
            "flag": "contiguous_gradients overlap_comm reduce_scatter use_multi_rank_bucket_allreduce "
            "allgather_partitions round_robin_gradients ignore_unused_parameters memory_efficient_linear "
            "stage3_use_all_reduce_for_fetch_params stage3_gather_16bit_weights_on_model_save "
            "offload_optimizer.pin_memory offload_param.pin_memory",
        },
        "zero_optimization.",
    ),
}
# Ignored with a note: the result of the run is the same without them.
IGNORED: dict[str, str] = {
    **_table(
        {
            "log.every_steps and log.trackers decide what is logged": "steps_per_print log_level dump_state "
            "tensorboard wandb comet csv_monitor",
            "sojourn measures time and memory itself": "wall_clock_breakdown memory_breakdown timers comms_logger "
            "flops_profiler",
            "train.activation_checkpointing decides it": "activation_checkpointing",
            "the data and train sections decide how rows are read": "dataloader_drop_last",
            "the save section decides how checkpoints are written": "checkpoint datastates",
            "the run has its own AdamW": "optimizer.params.torch_adam",
            "it is for NVMe only": "aio",
        }
    ),
    **_table(
        {
            "the save section decides how checkpoints are written": "elastic_checkpoint load_from_fp32_weights "
            "stage3_gather_fp16_weights_on_model_save",
            "it is for NVMe only": "offload_optimizer.nvme_path offload_optimizer.fast_init "
            "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_param.nvme_path",
        },
        "zero_optimization.",
    ),
}
# Refused unless they are off: they would change the result of the run, or would have no effect.
REFUSED: dict[str, str] = {
    **_table(
        {
            "would cast a second time; train.precision decides the dtype": "amp torch_autocast fp16.auto_cast",
            "is an old name; write bf16 instead": "bfloat16",
            "would accumulate gradients, which the run does itself": "managed_gradient_accumulation",
            "changes how gradients are averaged, which the run does itself": "prescale_gradients "
            "gradient_allreduce_op sparse_gradients disable_allgather",
            "splits the model over ranks, which is not supported": "pipeline tensor_parallel autotp expert_parallel",
            "is not supported; train.attention chooses the attention backend": "sparse_attention",
            "is not supported; train.compile decides whether the model is compiled": "compile",
            "would change the batch; train.global_batch and train.micro_batch decide its size": "elasticity autotuning",
            "would change the order of rows, which train.seed decides": "curriculum_learning data_efficiency",
            "is not supported; a run does not change the model": "progressive_layer_drop compression_training "
            "quantize_training weight_quantization eigenvalue hybrid_engine",
            "would keep fp32 master weights or optimizer states in 16-bit": "fp16.fp16_master_weights_and_grads "
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
            "would skip steps; train.on_nan decides what happens to steps with NaN": "bf16.check_grad_overflow",
        }
    ),
    **_table(
        {
            "quantizes communication, and losses would no longer be comparable": "zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param",
            "delays weight updates, and losses would no longer be comparable": "zenflow",
            "is not supported; ZeRO shards over all ranks": "mics_shard_size mics_hierarchical_params_gather",
            "is an old name; write offload_optimizer or offload_param instead": "cpu_offload cpu_offload_params "
            "cpu_offload_param cpu_offload_use_pin_memory",
            "is no longer in DeepSpeed": "legacy_stage1",
            "needs DeepSpeed's own Adam, but the run has its own": "offload_optimizer.super_offload",
        },
        "zero_optimization.",
    ),
}
KNOWN = (*TRAIN_KEYS, *COMPARED_TOGETHER, *PASSED_THROUGH, *FIXED, *IGNORED, *REFUSED)

# A scheduler as keys of `train`.
SCHEDULES: dict[str, Fields] = {
    "WarmupLR": {"schedule": "constant"},
    "WarmupDecayLR": {"schedule": "linear", "min_lr": 0},
    "WarmupCosineLR": {"schedule": "cosine"},
}
OFFLOAD_SECTIONS: dict[str, tuple[str, ...]] = {
    "off": (),
    "optimizer": ("offload_optimizer",),
    "all": ("offload_optimizer", "offload_param"),
}
