"""Settings of mixture-of-experts models: the load-balancing loss of their routers."""

from __future__ import annotations

from sojourn.catalog.models import ModelSpec
from sojourn.resolve.resolved import Resolved, Unsupported


def resolve_experts(resolved: Resolved, model: ModelSpec) -> None:
    """Unset, the coefficient is that of the model's config, if it has `output_router_logits`."""
    given = resolved.config.train.router_aux_loss_coef
    if given is None and model.router_aux_loss_coef:
        reason = "the model's config has output_router_logits"
        resolved.choose("train", "router_aux_loss_coef", model.router_aux_loss_coef, reason)
    elif given and model.experts is None:
        raise Unsupported("train.router_aux_loss_coef: this model has no experts; remove it")
    train = resolved.config.train
    if train.router_aux_loss_coef and train.compile == "on":
        raise Unsupported("train.compile: router logits cannot be read out of compiled layers; use train.compile=off")
