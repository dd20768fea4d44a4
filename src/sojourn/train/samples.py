"""Samples during training: greedy completions of the same few prompts at every evaluation.

The model that trains generates them itself (`infer/transformers_forward.py`), all at once: weights are not copied.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact, Split
from sojourn.infer.detokenize import make_decode
from sojourn.infer.engine.request import Request
from sojourn.infer.load import context_length
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer
from sojourn.infer.sampling import SamplingParams
from sojourn.infer.transformers_forward import generate_tokens
from sojourn.model.network import Network

_HELD_OUT_PROMPTS = 2
_HELD_OUT_ROWS = 8  # rows in which prompts are looked for
_MIN_TEXT_TOKENS = 24


class Samples:
    """The user's prompts (`train.samples`); without any, the beginnings of the first held-out documents."""

    def __init__(self, config: RunConfig, artefact: Artefact) -> None:
        tokenizer = open_tokenizer(artefact.tokenizer)
        self._decode, self._stop_ids = make_decode(tokenizer), frozenset(artefact.stop_ids)
        self._params = SamplingParams(max_tokens=config.train.sample_tokens)
        if config.train.samples:
            encoder, raw = PromptEncoder(tokenizer), not artefact.facts["chat"]
            self._prompts = [(prompt, encoder.prompt(prompt, raw)) for prompt in config.train.samples]
        else:
            beginnings = _beginnings(artefact.eval)[:_HELD_OUT_PROMPTS]
            self._prompts = [(tokenizer.decode(ids), ids) for ids in beginnings]

    def generate(self, network: Network, autocast: AbstractContextManager[object]) -> list[tuple[str, str]]:
        """Each prompt with its completion."""
        with network.transformers_attention() as model, autocast:
            context = context_length(model)
            longest = max(1, context - self._params.max_tokens)
            prompts = [ids[-longest:] for _, ids in self._prompts]
            requests = [
                Request("", ids, self._params, 0, min(self._params.max_tokens, context - len(ids)), self._stop_ids)
                for ids in prompts
            ]
            generate_tokens(model, requests)
        texts = (self._decode([token for token in one.tokens if token not in self._stop_ids]) for one in requests)
        return [(prompt, text) for (prompt, _), text in zip(self._prompts, texts, strict=True)]


def _beginnings(split: Split) -> list[list[int]]:
    """Of chats, everything before the first trained token; then, of texts, their first quarter."""
    chats, texts = [], []
    for number in range(min(len(split), _HELD_OUT_ROWS)):
        ids, mask, starts = split.row(number)
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            document = [int(i) for i in ids[start:stop]]
            untrained = int(np.argmax(mask[start:stop]))
            if untrained > 1:
                chats.append(document[:untrained])
            elif len(document) >= _MIN_TEXT_TOKENS:
                texts.append(document[: len(document) // 4])
    return chats + texts
