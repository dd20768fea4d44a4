"""A model as training sees it: a body that makes hidden states, a head that makes logits of them, and how it attends.

Shapes: B rows, T tokens a row, N target tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from sojourn.model import attention
from sojourn.model.layout import Layout


@dataclass(frozen=True)
class Network:
    """`model` may have an adapter on it. `backend` is None where the model's own attention is used, as it must be when
    it cannot be told about packed documents; then a row holds one document. `numbers`: what the blocks compute in by
    themselves; None where that is left to autocast. `short`: as last_block.py has made it."""

    model: Any
    backend: str | None
    numbers: Any = None
    short: bool = False

    @property
    def plain(self) -> Any:
        """The model of transformers, under any adapter."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def body(self) -> Any:
        return self.plain.get_decoder()

    @property
    def head(self) -> Any:
        return make_head(self.plain)

    @property
    def windows(self) -> tuple[int, ...]:
        """How far back its layers look, where not to the start."""
        window = getattr(self.plain.config.get_text_config(), "sliding_window", None)
        return (int(window),) if window else ()

    @cached_property
    def by_chance(self) -> bool:
        """Whether it drops anything at random."""
        dropouts = (module.p for module in self.model.modules() if isinstance(module, torch.nn.Dropout))
        return any(dropouts) or bool(getattr(self.plain.config.get_text_config(), "attention_dropout", 0.0))

    def hidden(self, ids_BT: Any, positions_BT: Any, layout: Layout | None, places_N: Any = None) -> Any:
        """Of all tokens, or one after another of those at `places_N` in the flattened batch, which are in order."""
        extra = {} if layout is None else {"layout": layout}
        if self.short:
            extra["places_N"] = places_N
        given, body = {"position_ids": positions_BT, "use_cache": False, **extra}, self.body
        if self.numbers is None:
            out = body(input_ids=ids_BT, **given).last_hidden_state
        else:
            with torch.autocast(ids_BT.device.type, enabled=False):
                embedded_BTD = body.get_input_embeddings()(ids_BT).to(self.numbers)
                out = body(inputs_embeds=embedded_BTD, **given).last_hidden_state
        if places_N is None:
            return out
        if self.short:
            return out[0]
        out_ND = out.flatten(0, 1)
        return out_ND if len(places_N) == len(out_ND) else out_ND.index_select(0, places_N)

    @contextmanager
    def own_attention(self) -> Iterator[Any]:
        """transformers' own attention, for generating; compiled blocks run uncompiled, as lengths vary."""
        was_training = self.model.training
        self.model.eval()
        if self.backend is not None:
            self.plain.set_attn_implementation(_own(self.plain))
        try:
            with torch.compiler.set_stance("force_eager"):
                yield self.model
        finally:
            if self.backend is not None:
                self.plain.set_attn_implementation(attention.NAME)
            self.model.train(was_training)


def open_network(model: Any, backend: str | None, numbers: Any = None) -> Network:
    network = Network(model, backend, numbers)
    if backend is not None:
        attention.register()
        network.plain.set_attn_implementation(attention.NAME)
    return network


def close_network(network: Network) -> None:
    """The model attends again as transformers would have it."""
    network.plain.set_attn_implementation(_own(network.plain))


def _own(model: Any) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def make_head(model: Any) -> Any:
    """The output layer, with what some families do to its logits afterwards."""
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)
    times = getattr(config, "logit_scale", None) or 1.0
    over = getattr(config, "logits_scaling", None) or 1.0
    return layer if cap is None and times == over == 1.0 else _Scaled(layer, times / over, cap)


class _Scaled(torch.nn.Module):
    def __init__(self, layer: Any, times: float, cap: float | None) -> None:
        super().__init__()
        self.layer, self.times, self.cap = layer, times, cap

    @property
    def weight(self) -> Any:
        return self.layer.weight

    def forward(self, hidden: Any) -> Any:
        logits = self.layer(hidden) * self.times
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
