"""Constrained decoding: which tokens may come next so that the answer matches a JSON schema, a regular expression or a
Lark grammar. llguidance does the matching; the mask is applied where tokens are sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("json_object", "json_schema", "regex", "lark")
MOST_TEXT = 1 << 18  # characters of a grammar
WHITESPACE = r"[ \n]{0,8}"  # between the parts of JSON: a small model could write spaces without end


class GrammarCompiler:
    """Of one tokenizer of transformers. `vocab_size`: of the model's logits, which may be more than the tokenizer's."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int]) -> None:
        from llguidance import LLTokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("constrained decoding (JSON, tools) needs a fast tokenizer (tokenizer.json)")
        backend = copy(backend)
        backend.no_padding()
        backend.no_truncation()
        self._stop_ids = sorted(stop for stop in stop_ids if 0 <= stop < vocab_size)
        eos = self._stop_ids or [tokenizer.eos_token_id or 0]
        try:
            self._tokenizer = LLTokenizer(backend.to_str(), eos_token=eos)
        except Exception as error:  # whatever its Rust side raises
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"constrained decoding (JSON, tools) does not know this tokenizer: {reason}") from None

    def mask(self, kind: str, text: str = "") -> GrammarMask:
        """Raises UserError where the grammar is not valid."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar_text(kind, text), log_level=0)
        if matcher.is_error():
            raise UserError(_first_line(matcher.get_error()))
        return GrammarMask(matcher, self._stop_ids)


class GrammarMask:
    """The state of one sequence. `error`: why matching had to be given up; the answer then ends."""

    def __init__(self, matcher: Any, stop_ids: list[int]) -> None:
        self._matcher, self._stop_ids = matcher, stop_ids
        self.error: str | None = None

    def fill(self, allowed_V: Tensor) -> None:
        """Sets a boolean vector, on any device, to the tokens that may come next."""
        import torch

        allowed_V.zero_()
        if self._matcher.is_stopped():
            allowed_V[self._stop_ids] = True
            return
        bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)[: len(allowed_V)]
        if self._matcher.is_error():  # its limits of time and size are reached
            self.error = _first_line(self._matcher.get_error())
            allowed_V[self._stop_ids] = True
            return
        allowed_V[: len(bias)] = (bias != 0).to(allowed_V.device)

    def accept(self, token: int) -> None:
        if self.error is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.error = _first_line(self._matcher.get_error())


def check_grammar(kind: str, text: str = "") -> None:
    """Raises UserError where the grammar is not valid, without a tokenizer."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_text(kind, text))
    if failed:
        raise UserError(_first_line(messages[0]))


def grammar_text(kind: str, text: str) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if len(text) > MOST_TEXT:
        raise UserError(f"it has {len(text):,} characters; allowed: {MOST_TEXT:,}")
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        return str(LLMatcher.grammar_from_lark(text))
    if kind not in KINDS:
        raise UserError(f"no such kind of grammar: {kind}; there are {', '.join(KINDS)}")
    schema = '{"type":"object"}' if kind == "json_object" else text
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise UserError(_first_line(str(error))) from None


def lark_json(schema: Any) -> str:
    """A JSON schema as a part of a Lark grammar, on one line."""
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": "[ ]?"}}
    return "%json " + json.dumps(schema, ensure_ascii=True, allow_nan=False)


def _first_line(message: str) -> str:
    return " ".join((message.strip().splitlines() or ["not valid"])[0].split())[:300]
