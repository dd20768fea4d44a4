"""Decides every `auto` of a run on the machine that trains it."""

from __future__ import annotations

from typing import Any

from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.resolve.resolve import Resolution, describe_faster_settings, describe_plain_forwards, resolve
from sojourn.train.local_device import local_device
from sojourn.train.model_spec import local_model_spec


def resolve_here(
    config: RunConfig, started: RunConfig | None = None, oom_fallback: dict[str, Any] | None = None, ranks: int = 1
) -> Resolution:
    """See `resolve.resolve`. Prints a note where the settings leave memory unused that would make the run faster, and
    where the model has no fused forwards."""
    model = local_model_spec(config)
    if config.model.base is not None and 0 < model.positions < config.data.max_length:
        raise UserError(
            f"data.max_length: it is {config.data.max_length}, but this model holds {model.positions} tokens; "
            f"use data.max_length={model.positions}"
        )
    device = local_device(config, model, ranks)
    found = resolve(config, model, device, started, oom_fallback)
    faster = None if oom_fallback else describe_faster_settings(config, found, model, device)
    for note in (faster, describe_plain_forwards(found, model, device)):
        if note is not None:
            print(f"note: {note}", flush=True)
    return found
