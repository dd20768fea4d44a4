"""Generation: prompts in, completions out, in batches or streamed. All generation goes through `generate_tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sojourn.errors import UserError
from sojourn.infer.load import LoadedModel, context_length

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0 is greedy decoding."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """`text`: without the prompt and without special tokens. `finish_reason`: stop (the model ended it) or length.
    `tokens`: generated ones."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    tokens: int


def apply_chat_template(tokenizer: Any, conversation: Conversation) -> str:
    return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def format_prompt(loaded: LoadedModel, text: str, raw: bool = False) -> str:
    """A user message in the model's chat template; the text itself if `raw`, or if the model has no chat template."""
    if raw or not loaded.is_chat:
        return text
    return apply_chat_template(loaded.tokenizer, [{"role": "user", "content": text}])


def generate_tokens(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    params: SamplingParams,
    pad_id: int,
    stop_ids: list[int] | None = None,
    streamer: Any = None,
) -> Tensor:
    """The new tokens of each row, at most as many as fit the model's context. `stop_ids`: the model's own if None.

    `inputs`: `input_ids` and `attention_mask`, padded on the left, on the model's device.
    """
    import torch

    length = inputs["input_ids"].shape[1]
    decoding: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if params.temperature > 0:
        decoding = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": 0}
    if stop_ids is not None:
        decoding["eos_token_id"] = stop_ids
    with torch.no_grad():  # not inference_mode: a model in training must not keep inference tensors in its caches
        tokens: Tensor = model.generate(
            **inputs,
            use_cache=True,
            max_new_tokens=min(params.max_tokens, context_length(model) - length),
            pad_token_id=pad_id,
            streamer=streamer,
            **decoding,
        )
    return tokens[:, length:]


def generate(
    loaded: LoadedModel, prompts: list[str], params: SamplingParams, batch_size: int = 64, streamer: Any = None
) -> list[Completion]:
    """One completion per prompt."""
    import torch

    if params.seed is not None:
        torch.manual_seed(params.seed)
    tokenizer, context = loaded.tokenizer, context_length(loaded.model)
    tokenizer.padding_side = "left"
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]] if prompts else []
    for prompt, length in zip(prompts, lengths, strict=True):
        which = f"the prompt “{' '.join(prompt.split())[:40]}…”" if len(prompts) > 1 else "the prompt"
        if length == 0:
            raise UserError(f"{which} is empty; give some text")
        if length >= context:
            raise UserError(f"{which} has {length:,} tokens, but the model's context is {context:,}; shorten it")
    if max(lengths, default=0) + params.max_tokens > context:
        batch_size = 1  # in a batch, the longest prompt would shorten the answers to all others
    stop_ids = _stop_ids(loaded.model)
    completions: list[Completion] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        encoded = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {name: encoded[name].to(loaded.device) for name in ("input_ids", "attention_mask")}
        tokens = generate_tokens(loaded.model, inputs, params, tokenizer.pad_token_id, streamer=streamer)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for row, text, length in zip(tokens.tolist(), texts, lengths[start:], strict=False):
            ended = next((index for index, token in enumerate(row) if token in stop_ids), None)
            count = len(row) if ended is None else ended + 1
            completions.append(Completion(text, "length" if ended is None else "stop", length, count))
    return completions


def _stop_ids(model: PreTrainedModel) -> set[int]:
    found: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    return set() if found is None else set(found) if isinstance(found, list) else {int(found)}


def describe_cut(loaded: LoadedModel, completion: Completion, params: SamplingParams) -> str | None:
    """Why an answer ends before the model ended it; None where it did not."""
    if completion.finish_reason != "length":
        return None
    if completion.tokens < params.max_tokens:
        context = context_length(loaded.model)
        return f"cut after {completion.tokens:,} tokens: prompt and answer fill the model's context of {context:,}"
    return f"cut after {completion.tokens:,} tokens; for more: --max-tokens {2 * params.max_tokens}"


def reply(loaded: LoadedModel, conversation: Conversation, params: SamplingParams) -> tuple[Completion, int]:
    """The assistant's next turn, printed as it is generated, and how many of the oldest turns no longer fit the context
    and were left out."""
    from transformers import TextStreamer

    tokenizer, turns = loaded.tokenizer, list(conversation)
    limit = context_length(loaded.model) * 3 // 4
    while len(turns) > 1 and len(tokenizer(apply_chat_template(tokenizer, turns))["input_ids"]) > limit:
        del turns[1 if turns[0]["role"] == "system" and len(turns) > 2 else 0]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    prompt = apply_chat_template(tokenizer, turns)
    return generate(loaded, [prompt], params, streamer=streamer)[0], len(conversation) - len(turns)
