"""The reference of an export, from its source: the base in transformers, in fp32, with its adapter in peft, not merged.
Merging is thus compared with what it must equal. A model that does not fit in memory is computed layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from sojourn.errors import RunFailed, UserError
from sojourn.export.open_source import Source
from sojourn.export.own_code import OwnCode
from sojourn.export.probes import builtin_probes, stored_probes
from sojourn.export.reference import Reference, build_reference
from sojourn.infer.adapter_weights import AdapterWeights
from sojourn.infer.runtimes.base import Runtime
from sojourn.infer.runtimes.streamed_runtime import StreamedRuntime
from sojourn.infer.runtimes.transformers_runtime import MEMORY_SHARE, TransformersRuntime, free_memory
from sojourn.infer.runtimes.transformers_tokenizer import TokenizerRuntime, as_ids, open_tokenizer
from sojourn.infer.weight_source import WeightSource
from sojourn.model.adapter import load_adapter
from sojourn.model.adapter_check import ADAPTER_FILE
from sojourn.model.quiet import quiet_transformers, suppress_stderr


def source_reference(source: Source, say: Callable[[str], None]) -> Reference:
    """Raises `RunFailed` where the source itself is not what its run trained."""
    config = source.weights.config
    context = (config.get("text_config") or config).get("max_position_embeddings") or 2**20
    with open_source(source, say) as runtime:
        return reference_of(runtime, int(context), source.probes)


def reference_of(runtime: Runtime, context: int, stored: Any = None) -> Reference:
    """`stored`: a run's own probes; the built-in ones are asked too."""
    return build_reference(runtime, [*stored_probes(stored), *builtin_probes()], context)


def open_source(source: Source, say: Callable[[str], None]) -> TokenizerRuntime:
    weights = source.weights
    if not fits_in_memory(weights):
        if source.code is not None:
            raise RunFailed(
                f"{source.path}: a model with its own Python code is checked as a whole, in fp32; that takes "
                f"{_fp32_bytes(weights) / MEMORY_SHARE / 2**30:.1f} GiB of free memory: export it on a larger machine"
            )
        say("note: the model does not fit in memory, so its greedy text is not compared, only its logits")
        return StreamedRuntime(weights)
    tokenizer, stops = open_tokenizer(weights.tokenizer_folder), weights.generation_config or weights.config
    return TransformersRuntime(_model(source), tokenizer, as_ids(stops.get("eos_token_id")))


def fits_in_memory(weights: WeightSource) -> bool:
    return _fp32_bytes(weights) <= free_memory() * MEMORY_SHARE


def _fp32_bytes(weights: WeightSource) -> int:
    return 4 * sum(prod(weights.shape(name)) for name in weights.names())


def _model(source: Source) -> Any:
    only = source.adapters[0] if len(source.adapters) == 1 else None
    if only is not None and _is_in_peft_files(only):
        return load_adapter(model_of(source.base, source.code), only.path, trainable=False)
    return model_of(source.weights, source.code)


def _is_in_peft_files(adapter: AdapterWeights) -> bool:
    return adapter.weight == 1.0 and (adapter.path / ADAPTER_FILE).is_file()


def _config_and_class(values: dict[str, Any], kind: str) -> tuple[Any, Any]:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.for_model(**values)
        return config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (KeyError, ValueError):
        raise UserError(f"transformers here has no causal language model of type {kind}; try a newer version") from None


def model_of(weights: WeightSource, code: OwnCode | None = None) -> Any:
    """transformers' model with these weights, in fp32; with `code`, of its classes."""
    import torch

    quiet_transformers()
    kind = str(weights.config.get("model_type"))
    if code is not None:
        config, causal = code.config(weights.config), code.model_class
    else:
        config, causal = _config_and_class(weights.config, kind)
    state = {name: weights.load(name).float() for name in weights.names()}
    given = {"config": config, "state_dict": state, "dtype": torch.float32, "output_loading_info": True}
    try:
        with suppress_stderr(True):
            model, info = causal.from_pretrained(None, **given)
    except (RuntimeError, ValueError) as error:
        if "memory" in str(error).lower():
            raise
        raise UserError(f"the weights do not fit config.json ({kind}); copy or download the model again") from None
    if info["missing_keys"]:  # transformers would initialize them at random
        raise UserError(f"the model lacks {sorted(info['missing_keys'])[0]}; copy or download it again")
    return model
