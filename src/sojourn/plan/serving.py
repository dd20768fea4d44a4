"""How many users a GPU holds: weights, and KV caches in what they leave, as the builtin engine divides the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.catalog.gpus import Gpu
from sojourn.catalog.models import ModelSpec
from sojourn.config.load import load_run, read_config
from sojourn.config.preset import find_preset
from sojourn.errors import UserError
from sojourn.estimate.allocator import context_bytes
from sojourn.estimate.serving import (
    FAMILIES,
    MAX_ROWS,
    decode_rate,
    kv_bytes_per_token,
    kv_memory,
    prefill_rate,
    users_in,
    weight_bytes,
)
from sojourn.plan.ranges import rate_text
from sojourn.resolve.model_spec import base_model_spec, model_spec_of
from sojourn.run.home import home

_MIB, _GIB = 2**20, 2**30
_DEFAULT_CONTEXT = 4096
_CONTEXTS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_QUANTIZED = "int8 or fp8"


@dataclass(frozen=True)
class Serving:
    """One model on one GPU, in bytes. `dtype`: of the weights; the KV cache is in bf16. `kv`: 0 where there is none."""

    model: ModelSpec
    gpu: Gpu
    dtype: str
    usable: int
    weights: int
    kv: int
    kv_per_token: int

    def users(self, context: int) -> int:
        """At a time, each with a prompt and an answer of so many tokens together."""
        return users_in(self.kv, self.kv_per_token, context)

    def rate(self, users: int, context: int) -> float | None:
        """Tokens a second of so many users together."""
        return decode_rate(self.model, self.gpu, users, context, None if self.dtype == "bf16" else "int8")


def model_to_serve(args: list[str]) -> ModelSpec:
    """A run, a preset or a YAML file with settings, as for a plan of training; else a model by name or folder."""
    first = args[0]
    run = home() / "runs" / first / "run.yaml"
    is_run = len(args) > 1 or find_preset(first) is not None or Path(first).suffix.lower() in (".yaml", ".yml")
    if is_run or (Path(first) / "run.yaml").is_file():
        return model_spec_of(load_run(args).config)
    if run.is_file():
        return model_spec_of(read_config(run))
    try:
        return base_model_spec(first)
    except UserError as error:
        raise UserError(str(error).removeprefix("model.base: ")) from None


def plan_serving(model: ModelSpec, gpu: Gpu, quantized: bool = False) -> Serving:
    """Quantized weights are loaded in bf16 first, which must fit, too; on CUDA and CPUs only."""
    usable, weights = int(gpu.plan_gib * _GIB), weight_bytes(model, quantization="int8" if quantized else None)
    context = context_bytes(gpu.capability) if gpu.capability is not None else 0
    loads = usable > context + weight_bytes(model) and not (quantized and gpu.unified)
    left = usable - context - weights if loads else 0
    kv = kv_memory(left, "cpu" if gpu.unified else "cuda")
    dtype = _QUANTIZED if quantized else "bf16"
    return Serving(model, gpu, dtype, usable, weights, kv, kv_bytes_per_token(model))


def contexts_of(model: ModelSpec, asked: int) -> list[int]:
    """Rows of the table: what the model can have, and what was asked for."""
    most = model.positions or max(_CONTEXTS)
    return sorted({*(one for one in _CONTEXTS if one <= most), asked})


def default_context(model: ModelSpec) -> int:
    return min(_DEFAULT_CONTEXT, model.positions or _DEFAULT_CONTEXT)


def serving_lines(model: ModelSpec, cards: Sequence[Gpu], context: int, named: bool) -> list[str]:
    """One sentence, then the table. `named`: the user named the cards, so there is one for each."""
    plans = [(plan_serving(model, card), plan_serving(model, card, quantized=True)) for card in cards]
    if not named:
        return [_smallest(plans, context), *_notes(model, context), "", *_card_table(plans, context)]
    lines: list[str] = []
    for whole, quantized in plans:
        lines += [*([""] if lines else ()), _sentence(whole, quantized, context)]
        lines += _notes(model, context) if whole is plans[0][0] else ()
        fitting = next((plan for plan in (whole, quantized) if plan.users(context)), None)
        if fitting is not None:
            lines += [_memory(fitting), *_speed(fitting, context), "", *_context_table(whole, quantized, context)]
    return lines


def _sentence(whole: Serving, quantized: Serving, context: int) -> str:
    name, card, weights = (
        whole.model.name,
        whole.gpu.name,
        f"weights take {_size(whole.weights)} of {_size(whole.usable)}",
    )
    if users := whole.users(context):
        more = f" (in {_QUANTIZED}: {quantized.users(context):,})" if quantized.kv else ""
        return f"{card} holds {_count(users)} of {name} with {context:,} tokens each, in bf16{more}"
    if users := quantized.users(context):
        how = f"in {_QUANTIZED} (--quantize), and none in bf16"
        return f"{card} holds {_count(users)} of {name} with {context:,} tokens each {how}: {weights}"
    other = "a GGUF file may fit: sojourn export … --to gguf --quantize q4_k_m, then sojourn serve FILE"
    return f"{card} holds no user of {name} with {context:,} tokens: {weights} in bf16; {other}"


def _smallest(plans: Sequence[tuple[Serving, Serving]], context: int) -> str:
    one = plans[0][0]
    head = (
        f"{one.model.name}: {_size(one.weights)} of weights in bf16, {_size(one.kv_per_token * context)} of KV cache "
    )
    head += f"a user of {context:,} tokens"
    fitting = [whole for whole, _ in plans if whole.users(context)]
    if not fitting:
        return f"{head}; no single GPU of the catalogue holds a user in bf16"
    least = min(fitting, key=lambda one: (one.usable, one.users(context)))
    return f"{head}; the smallest GPU that holds it is {least.gpu.name}, with {_count(least.users(context))}"


def _count(users: int) -> str:
    return "one user" if users == 1 else f"{users:,} users"


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:,.0f} MiB"


def _notes(model: ModelSpec, context: int) -> list[str]:
    notes = [model.caveat] if model.caveat else []
    if model.family not in FAMILIES:
        notes.append(f"the builtin engine does not compute {model.family}; --engine vllm does, whose memory differs")
    if 0 < model.positions < context:
        notes.append(f"{model.name} holds {model.positions:,} tokens, fewer than --context {context:,}")
    return [f"note: {note}" for note in notes]


def _memory(plan: Serving) -> str:
    kept = plan.usable - plan.weights - plan.kv
    return (
        f"memory in {plan.dtype}: {_size(plan.usable)} usable: weights {_size(plan.weights)}, KV cache {_size(plan.kv)}"
        f" ({plan.kv_per_token / 1024:,.0f} KiB a token), CUDA, activations and margin {_size(kept)}"
    )


def _speed(plan: Serving, context: int) -> list[str]:
    """For one user, for as many as there are at a time, and of prompts."""
    users = min(plan.users(context), MAX_ROWS)
    one, many, prompts = plan.rate(1, context), plan.rate(users, context), prefill_rate(plan.model, plan.gpu)
    if one is None or many is None or prompts is None:
        return []
    said = f"about {rate_text(one, plan.gpu)} tok/s for one user"
    if users > 1:
        said += f", {rate_text(many, plan.gpu)} for {users} together ({rate_text(many / users, plan.gpu)} each)"
    tried = "" if plan.gpu.rates == "measured" else "; only an H200 was measured"
    return [f"speed in {plan.dtype}: {said}; prompts are read at about {rate_text(prompts, plan.gpu)} tok/s{tried}"]


def _context_table(whole: Serving, quantized: Serving, asked: int) -> list[str]:
    lines = [f"{'context':>9}{'a user':>10}{'bf16':>8}{_QUANTIZED:>13}"]
    for context in contexts_of(whole.model, asked):
        users = (whole.users(context), quantized.users(context))
        if any(users) or context == asked:
            size = _size(whole.kv_per_token * context)
            lines.append(f"{context:>9,}{size:>10}{users[0]:>8,}{users[1]:>13,}")
    lines.append(f"users at a time; sojourn serve runs {MAX_ROWS} unless --max-requests says more")
    return lines


def _card_table(plans: Sequence[tuple[Serving, Serving]], context: int) -> list[str]:
    width = 2 + max(len(whole.gpu.name) for whole, _ in plans)
    lines = [f"{'GPU':<{width}}{'GiB':>6}{'bf16':>8}{_QUANTIZED:>13}{'tok/s':>8}{'together':>10}"]
    for whole, quantized in sorted(plans, key=lambda one: one[0].usable):
        users = (whole.users(context), quantized.users(context))
        if any(users):
            lines.append(
                f"{whole.gpu.name:<{width}}{whole.usable / _GIB:>6.0f}{users[0]:>8,}{users[1]:>13,}"
                + "".join(_rates(whole if users[0] else quantized, context))
            )
    runs = f"sojourn serve runs {MAX_ROWS} unless --max-requests says more"
    return [
        *lines,
        f"users at a time with {context:,} tokens each; {runs}",
        f"tok/s: about, for one user and for all of them, {MAX_ROWS} at most; only an H200 was measured",
    ]


def _rates(plan: Serving, context: int) -> tuple[str, str]:
    users = min(plan.users(context), MAX_ROWS)
    one, many = plan.rate(1, context), plan.rate(users, context)
    shown = (rate_text(one, plan.gpu), rate_text(many, plan.gpu)) if one and many else ("?", "?")
    return f"{shown[0]:>8}", f"{shown[1]:>10}"


def serving_values(model: ModelSpec, cards: Sequence[Gpu], context: int) -> dict[str, object]:
    """For --json."""
    rows = []
    for card in cards:
        for plan in (plan_serving(model, card), plan_serving(model, card, quantized=True)):
            users = {str(one): plan.users(one) for one in contexts_of(model, context)}
            together = min(plan.users(context), MAX_ROWS)
            rows.append({
                "gpu": card.name, "dtype": plan.dtype, "usable_bytes": plan.usable, "weight_bytes": plan.weights,
                "kv_bytes": plan.kv, "kv_bytes_per_token": plan.kv_per_token, "users": users,
                "tokens_per_second": plan.rate(1, context) if together else None,
                "tokens_per_second_together": plan.rate(together, context) if together else None,
                "prompt_tokens_per_second": prefill_rate(model, card),
            })  # fmt: skip
    return {"model": model.name, "context": context, "gpus": rows}
