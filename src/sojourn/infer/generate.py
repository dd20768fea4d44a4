"""Completions: prompts in, texts out, many at a time or streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.errors import UserError
from sojourn.infer.load import Model

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy: always the likeliest token."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


def as_prompt(model: Model, question: str, raw: bool = False) -> str:
    """A question the way the model was trained to see it; with `raw`, or for a text model, just the text."""
    return question if raw or not model.is_chat else render(model, [{"role": "user", "content": question}])


def render(model: Model, conversation: Conversation) -> str:
    return str(model.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def generate(model: Model, prompts: list[str], sampling: Sampling, batch: int = 64, streamer: Any = None) -> list[str]:
    """One completion a prompt, without the prompt and without special tokens."""
    import torch

    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    tokenizer = model.tokenizer
    tokenizer.padding_side = "left"
    texts: list[str] = []
    for start in range(0, len(prompts), batch):
        inputs = tokenizer(prompts[start : start + batch], return_tensors="pt", padding=True, add_special_tokens=False)
        length = inputs["input_ids"].shape[1]
        room = model.context - length
        if length == 0:
            raise UserError("the prompt is empty; give some text")
        if room <= 0:
            raise UserError(f"the prompt is {length} tokens long, but this model holds {model.context}; shorten it")
        chosen: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            chosen = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        with torch.inference_mode():
            output = model.network.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                max_new_tokens=min(sampling.max_tokens, room),
                pad_token_id=tokenizer.pad_token_id,
                streamer=streamer,
                **chosen,
            )
        texts += tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
    return texts


def reply(model: Model, conversation: Conversation, sampling: Sampling) -> str:
    """The assistant's next turn, printed as it comes. The oldest turns are dropped when the context is full."""
    from transformers import TextStreamer

    turns = list(conversation)
    while len(turns) > 1 and len(model.tokenizer(render(model, turns))["input_ids"]) > model.context * 3 // 4:
        del turns[1 if turns[0]["role"] == "system" and len(turns) > 2 else 0]
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    return generate(model, [render(model, turns)], sampling, streamer=streamer)[0]
