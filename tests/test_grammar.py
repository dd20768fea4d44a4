"""Constrained decoding: what a mask allows, and when the answer may end."""

from __future__ import annotations

import json

import pytest
import torch

from sojourn.errors import UserError
from sojourn.infer.grammar import MOST_TEXT, GrammarCompiler, check_grammar, lark_json
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
          "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return open_tokenizer(tiny.base)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + 8, [tokenizer.eos_token_id])


def walk(compiler: GrammarCompiler, tokenizer, kind: str, text: str, answer: str) -> tuple[str, bool]:
    """As much of the answer as the mask allows, and whether it may end there."""
    mask, allowed = compiler.mask(kind, text), torch.zeros(len(tokenizer) + 8, dtype=torch.bool)
    given: list[int] = []
    for token in tokenizer.backend_tokenizer.encode(answer, add_special_tokens=False).ids:
        mask.fill(allowed)
        if not allowed[token]:
            break
        mask.accept(token)
        given.append(token)
    mask.fill(allowed)
    assert mask.error is None and not allowed[-8:].any()  # no token of the tokenizer has these ids
    return tokenizer.decode(given), bool(allowed[tokenizer.eos_token_id])


@pytest.mark.parametrize(
    ("kind", "text", "answer", "accepted"),
    [
        ("json_object", "", '{"a": [1, true, null], "b": {}}', None),
        ("json_object", "", "[1]", ""),
        ("json_schema", json.dumps(PERSON), '{"age": 12}', None),
        ("json_schema", json.dumps(PERSON), '{"name": 12}', '{"'),
        ("regex", "(yes|no), (sir|madam)", "yes, sir", None),
        ("lark", f"start: \"<call>\" {lark_json(PERSON)} \"</call>\"", '<call>{"age": 1}</call>', None),
    ],
)  # fmt: skip
def test_a_mask_allows_what_matches_and_nothing_else(
    compiler: GrammarCompiler, tokenizer, kind: str, text: str, answer: str, accepted: str | None
) -> None:
    found, may_end = walk(compiler, tokenizer, kind, text, answer)
    assert (found, may_end) == (answer if accepted is None else accepted, accepted is None)


def test_an_answer_that_is_complete_can_only_end(compiler: GrammarCompiler, tokenizer) -> None:
    mask, allowed = compiler.mask("regex", "ab"), torch.ones(len(tokenizer) + 8, dtype=torch.bool)
    for token in tokenizer.backend_tokenizer.encode("ab", add_special_tokens=False).ids:
        mask.accept(token)
    mask.fill(allowed)
    assert allowed.nonzero().flatten().tolist() == [tokenizer.eos_token_id]
    mask.accept(tokenizer.eos_token_id)
    mask.fill(allowed)
    assert allowed.nonzero().flatten().tolist() == [tokenizer.eos_token_id] and mask.error is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nope"}'), ("json_schema", "{"), ("json_schema", '{"$ref": "#/x"}'),
        ("json_schema", '{"a":' * 500 + "1" + "}" * 500), ("regex", "((("), ("lark", "start: nowhere"),
        ("regex", "a" * (MOST_TEXT + 1)), ("sonnet", ""),
    ],
)  # fmt: skip
def test_a_grammar_that_is_not_valid_is_one_line(compiler: GrammarCompiler, kind: str, text: str) -> None:
    for check in (check_grammar, compiler.mask):
        with pytest.raises(UserError) as error:
            check(kind, text)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
