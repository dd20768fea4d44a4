"""Logits of a model whose weights are read while they are used: each module loads its own in fp32, computes, and drops
them. The memory is that of the largest matrix and of the activations, not of the model. Slow, but exact: this is how a
model that does not fit in memory is compared with another copy of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError
from sojourn.infer.weight_source import WeightSource, row_pieces
from sojourn.model.quiet import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor, nn


def streamed_logits(source: WeightSource, ids: list[list[int]]) -> list[Tensor]:
    """Of each token list: (tokens, vocabulary), fp32, teacher-forced. All lists are computed together, so that every
    weight is read once."""
    import torch

    model = _meta_model(source)
    _stream_weights(model, source)
    packed = torch.tensor([[token for tokens in ids for token in tokens]])
    positions = torch.cat([torch.arange(len(tokens)) for tokens in ids]).unsqueeze(0)
    with torch.no_grad():  # positions that restart tell transformers where a list ends
        logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    return list(logits.split([len(tokens) for tokens in ids]))


def _meta_model(source: WeightSource) -> Any:
    """Parameters take no memory; buffers, such as RoPE's frequencies, are computed."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    quiet_transformers()
    kind = str(source.config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{source.tokenizer_folder}: transformers has no model type “{kind}” of its own")
    config = CONFIG_MAPPING[kind].from_dict(source.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    for module in model.modules():
        on_meta = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in on_meta:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if on_meta:
            model._init_weights(module)
    return model


def _stream_weights(model: Any, source: WeightSource) -> None:
    known, embedding, head = set(source.names()), model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    for module, prefix in names.items():
        parameters = [name for name, _ in module.named_parameters(recurse=False)]
        full = {name: f"{prefix}.{name}" for name in parameters}
        if module is head and full["weight"] not in known:
            full["weight"] = f"{names[embedding]}.weight"  # tied
        missing = next((name for name in full.values() if name not in known), None)
        if missing is not None:
            raise UserError(f"{source.tokenizer_folder}: {missing} is not among the model's weights")
        if module is embedding:
            _stream_embedding(module, source, full["weight"])
        elif module is head:
            _stream_head(module, source, full)
        elif parameters:
            _stream_module(module, source, full)


def _stream_module(module: nn.Module, source: WeightSource, names: dict[str, str]) -> None:
    empty = dict(module._parameters)

    def load(*_: Any) -> None:
        for name, full in names.items():
            module._parameters[name] = _parameter(source.load(full))

    def drop(*_: Any) -> None:
        module._parameters.update(empty)

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)


def _stream_embedding(module: Any, source: WeightSource, name: str) -> None:
    """Reads only the rows of the tokens that occur."""
    import torch

    empty = module.weight
    module.padding_idx = None

    def load(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, places = torch.unique(inputs[0], return_inverse=True)
        rows = [source.rows(name, token, token + 1) for token in tokens.tolist()]
        module._parameters["weight"] = _parameter(torch.cat(rows))
        return (places, *inputs[1:])

    def drop(*_: Any) -> None:
        module._parameters["weight"] = empty

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)


def _stream_head(module: Any, source: WeightSource, names: dict[str, str]) -> None:
    """Some rows of the vocabulary at a time."""
    import torch

    def forward(hidden: Tensor) -> Tensor:
        logits = torch.empty((*hidden.shape[:-1], source.shape(names["weight"])[0]), dtype=torch.float32)
        for start, stop in row_pieces(source.shape(names["weight"])):
            logits[..., start:stop] = hidden @ source.rows(names["weight"], start, stop).float().T
        return logits + source.load(names["bias"]).float() if "bias" in names else logits

    streamed: Callable[[Tensor], Tensor] = forward
    module.forward = streamed


def _parameter(tensor: Tensor) -> Any:
    import torch

    return torch.nn.Parameter(tensor.float() if tensor.is_floating_point() else tensor, requires_grad=False)
