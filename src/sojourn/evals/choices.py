"""Log-likelihoods of continuations, for multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sojourn.data.sources.values import BadRecord
from sojourn.errors import UserError
from sojourn.evals.task_file import Question
from sojourn.infer.load import LoadedModel, context_length
from sojourn.infer.prompts import PromptEncoder
from sojourn.model.loss import token_losses
from sojourn.model.network import make_lm_head

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKENS = 8192  # in one forward


def score_choices(loaded: LoadedModel, questions: Sequence[Question]) -> list[np.ndarray]:
    """The log-likelihood of each choice of each question, after its prompt."""
    encoder = PromptEncoder(loaded.tokenizer)
    pairs = [pair for question in questions for pair in _encode(loaded, encoder, question)]
    found = iter(_log_likelihoods(loaded, pairs))
    return [np.array([next(found) for _ in question.choices]) for question in questions]


def _encode(loaded: LoadedModel, encoder: PromptEncoder, question: Question) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and continuation. A chat model's is a reply; else a space is between them, as in lm-eval."""
    row = question.row
    try:
        if encoder.is_chat:
            prompt = row.encode(encoder, raw=False)
            pairs = [(prompt, encoder.continuation(choice)) for choice in question.choices]
        else:
            if row.messages:
                raise BadRecord("messages, but the model has no chat template")
            text, space = row.text.rstrip(), row.text[len(row.text.rstrip()) :] or " "
            prompt = encoder.text(text)
            pairs = [(prompt, encoder.text(text + space + choice)[len(prompt) :]) for choice in question.choices]
    except BadRecord as error:
        raise UserError(f"{question.where}: {error}") from None
    context = context_length(loaded.model)
    for choice, pair in zip(question.choices, pairs, strict=True):
        if not pair[0] or not pair[1]:
            raise UserError(f"{question.where}: choice “{choice[:40]}” is empty")
        if sum(map(len, pair)) > context:
            raise UserError(f"{question.where}: {sum(map(len, pair)):,} tokens, but the context is {context:,}")
    return iter(pairs)


def _log_likelihoods(loaded: LoadedModel, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    import torch

    model, found = loaded.model, [0.0] * len(pairs)
    head, decoder, pad_id = make_lm_head(model), model.get_decoder(), loaded.tokenizer.pad_token_id or 0
    order = sorted(range(len(pairs)), key=lambda at: -sum(map(len, pairs[at])))
    while order:
        width = sum(map(len, pairs[order[0]]))
        batch, order = order[: max(1, _TOKENS // width)], order[max(1, _TOKENS // width) :]
        ids = [[*pairs[at][0], *pairs[at][1]] for at in batch]
        padded = torch.tensor([row + [pad_id] * (width - len(row)) for row in ids], device=loaded.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=loaded.device)
        places = [
            (row, place - 1)
            for row, at in enumerate(batch)
            for place in range(len(pairs[at][0]), len(ids[row]))
        ]  # fmt: skip
        rows, columns = (torch.tensor(one, device=loaded.device) for one in zip(*places, strict=True))
        with torch.no_grad():
            hidden = decoder(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state
            losses, _ = token_losses(head, hidden[rows, columns], padded[rows, columns + 1])
        for (row, _), loss in zip(places, losses.tolist(), strict=True):
            found[batch[row]] -= loss
    return found
