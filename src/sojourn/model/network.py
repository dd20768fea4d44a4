"""A model as training sees it: a decoder that makes hidden states, an LM head that makes logits, an attention backend.

Shapes: B rows, T tokens per row, N target tokens, D hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sojourn.model import attention
from sojourn.model.layout import Layout
from sojourn.model.neftune import EmbeddingNoise


@dataclass(frozen=True)
class Network:
    """`model` may be a peft model. `attention_backend` is None where the model keeps transformers' own attention
    because it does not support packed documents; then a row holds one document. `compute_dtype`: the decoder casts
    embeddings and weights to it; None leaves casting to autocast. `last_layer_pruned`: see prune_last_layer.py."""

    model: nn.Module
    attention_backend: str | None
    compute_dtype: torch.dtype | None = None
    last_layer_pruned: bool = False

    @property
    def base_model(self) -> nn.Module:
        """The transformers model, under any adapter."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @cached_property
    def decoder(self) -> nn.Module:
        return self.base_model.get_decoder()

    @cached_property
    def lm_head(self) -> nn.Module:
        return make_lm_head(self.base_model)

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """Sizes of the sliding windows of its attention layers; empty where all attend to the whole document."""
        window = getattr(self.base_model.config.get_text_config(), "sliding_window", None)
        return (int(window),) if window else ()

    @cached_property
    def has_dropout(self) -> bool:
        dropouts = (module.p for module in self.model.modules() if isinstance(module, nn.Dropout))
        return any(dropouts) or bool(getattr(self.base_model.config.get_text_config(), "attention_dropout", 0.0))

    def hidden_states(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        layout: Layout | None,
        target_indices_N: Tensor | None = None,
        noise: EmbeddingNoise | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Of all tokens (BTD), or of those at `target_indices_N` (ascending) in the flattened batch (ND).
        `router_logits`: a list that gets those of each mixture-of-experts layer."""
        kwargs = {"position_ids": positions_BT, "use_cache": False}
        if router_logits is not None:
            kwargs["output_router_logits"] = True
        if layout is not None:
            kwargs["layout"] = layout
        if self.last_layer_pruned:
            kwargs["target_indices_N"] = target_indices_N
        try:
            output = self._decode(ids_BT, noise, kwargs)
        except TypeError as error:
            if "argument 'layout'" not in str(error):
                raise
            raise NotImplementedError(str(error)) from None  # older code does not pass it on to its attention
        if router_logits is not None:
            router_logits += output.router_logits
        hidden = output.last_hidden_state
        if target_indices_N is None:
            return hidden
        if self.last_layer_pruned:
            return hidden[0]
        flat_D = hidden.flatten(0, 1)
        return flat_D if len(target_indices_N) == len(flat_D) else flat_D.index_select(0, target_indices_N)

    def _decode(self, ids_BT: Tensor, noise: EmbeddingNoise | None, kwargs: dict[str, Any]) -> Any:
        decoder, casts_itself = self.decoder, self.compute_dtype is not None
        if not casts_itself and noise is None:
            return decoder(input_ids=ids_BT, **kwargs)
        with torch.autocast(ids_BT.device.type, enabled=False) if casts_itself else nullcontext():
            embeddings_BTD = decoder.get_input_embeddings()(ids_BT)
            if noise is not None:
                embeddings_BTD = noise.add_to(embeddings_BTD)
            return decoder(inputs_embeds=embeddings_BTD.to(self.compute_dtype), **kwargs)

    @contextmanager
    def transformers_attention(self) -> Iterator[nn.Module]:
        """In eval mode, with transformers' own attention or another one that is set meanwhile. Compiled layers run
        eagerly, since lengths vary."""
        was_training, before = self.model.training, self.base_model.config._attn_implementation
        self.model.eval()
        if self.attention_backend is not None:
            restore_attention(self)
        try:
            with torch.compiler.set_stance("force_eager"):
                yield self.model
        finally:
            if self.base_model.config._attn_implementation != before:
                self.base_model.set_attn_implementation(before)
            self.model.train(was_training)


def wrap_model(model: nn.Module, attention_backend: str | None, compute_dtype: torch.dtype | None = None) -> Network:
    """Makes the model call our attention, unless `attention_backend` is None, or its code cannot call another attention
    than its own."""
    network = Network(model, attention_backend, compute_dtype)
    if attention_backend is None:
        return network
    attention.register()
    network.base_model.set_attn_implementation(attention.NAME)
    calls_ours = network.base_model.config._attn_implementation == attention.NAME
    return network if calls_ours else replace(network, attention_backend=None)


def restore_attention(network: Network) -> None:
    """Gives the model transformers' own attention back."""
    model = network.base_model
    model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")


def make_lm_head(model: nn.Module) -> nn.Module:
    """The output layer, with the logit scaling and soft-capping of families that have them."""
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    softcap = getattr(config, "final_logit_softcapping", None)
    multiplier = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    if softcap is None and multiplier == divisor == 1.0:
        return layer
    return _ScaledLMHead(layer, multiplier / divisor, softcap)


class _ScaledLMHead(nn.Module):
    def __init__(self, layer: nn.Module, scale: float, softcap: float | None) -> None:
        super().__init__()
        self.layer, self.scale, self.softcap = layer, scale, softcap

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.layer(hidden) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
