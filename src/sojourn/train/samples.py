"""What the model says while it learns: greedy answers to the same few prompts at every evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact, Split
from sojourn.model.network import Network

_HELD_OUT = 2
_LOOKED_AT = 8
_LEAST_TEXT = 24


class Samples:
    """The user's prompts; without any, the beginnings of the first held-out documents."""

    def __init__(self, config: RunConfig, artefact: Artefact) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(artefact.tokenizer)
        self._stops, self._pad, self._most = artefact.stop_ids, artefact.pad_id, config.train.sample_tokens
        if config.train.samples:
            self._prompts = [(prompt, self._ids(prompt, artefact)) for prompt in config.train.samples]
        else:
            found = _beginnings(artefact.eval)
            self._prompts = [(self._tokenizer.decode(ids), ids) for ids in found[:_HELD_OUT]]

    def _ids(self, prompt: str, artefact: Artefact) -> list[int]:
        text = prompt
        if artefact.facts["chat"]:
            turns = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def take(self, network: Network, autocast: Any, device: str) -> list[tuple[str, str]]:
        """Each prompt with its answer."""
        import torch

        told = []
        holds = getattr(network.plain.config.get_text_config(), "max_position_embeddings", None) or 2**20
        with network.own_attention() as model, torch.no_grad(), autocast:
            for prompt, whole in self._prompts:
                ids = whole[-max(1, holds - self._most) :]
                given = torch.tensor([ids], device=device)
                out = model.generate(
                    input_ids=given, attention_mask=torch.ones_like(given), use_cache=True,
                    max_new_tokens=min(self._most, holds - len(ids)),
                    do_sample=False, temperature=None, top_p=None, top_k=None,
                    eos_token_id=self._stops, pad_token_id=self._pad,
                )  # fmt: skip
                told.append((prompt, self._tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)))
        return told


def _beginnings(split: Split) -> list[list[int]]:
    """Of chats, all before the first trained word; then of texts, their first quarter."""
    questions, texts = [], []
    for number in range(min(len(split), _LOOKED_AT)):
        ids, mask, starts = split.row(number)
        for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
            document = [int(i) for i in ids[start:stop]]
            untrained = int(np.argmax(mask[start:stop]))
            if untrained > 1:
                questions.append(document[:untrained])
            elif len(document) >= _LEAST_TEXT:
                texts.append(document[: len(document) // 4])
    return questions + texts
