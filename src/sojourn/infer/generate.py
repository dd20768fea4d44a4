"""Generation: prompts in, completions out, in batches or streamed. All generation goes through `generate_tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
) -> list[str]:
    """One completion per prompt, without the prompt and without special tokens."""
    import torch

    if params.seed is not None:
        torch.manual_seed(params.seed)
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    completions: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        encoded = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        length, context = encoded["input_ids"].shape[1], context_length(loaded.model)
        if length == 0:
            raise UserError("the prompt is empty; give some text")
        if length >= context:
            raise UserError(f"the prompt has {length} tokens, but the model's context is {context} tokens; shorten it")
        inputs = {name: encoded[name].to(loaded.device) for name in ("input_ids", "attention_mask")}
        tokens = generate_tokens(loaded.model, inputs, params, tokenizer.pad_token_id, streamer=streamer)
        completions += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return completions


def reply(loaded: LoadedModel, conversation: Conversation, params: SamplingParams) -> str:
    """The assistant's next turn, printed as it is generated. Drops the oldest turns when the context is full."""
    from transformers import TextStreamer

    tokenizer, turns = loaded.tokenizer, list(conversation)
    limit = context_length(loaded.model) * 3 // 4
    while len(turns) > 1 and len(tokenizer(apply_chat_template(tokenizer, turns))["input_ids"]) > limit:
        del turns[1 if turns[0]["role"] == "system" and len(turns) > 2 else 0]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    return generate(loaded, [apply_chat_template(tokenizer, turns)], params, streamer=streamer)[0]
