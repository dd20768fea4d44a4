"""Tool calls in what models write, wherever the pieces of a stream are divided, and the grammars that require them."""

from __future__ import annotations

import json
import random

import pytest
import torch

from sojourn.infer.grammar import GrammarCompiler, check_grammar
from sojourn.infer.runtimes.transformers_tokenizer import open_tokenizer
from sojourn.serve.tools import Call, ToolForm, ToolParser, ToolSpec, call_grammar, find_form

F, G = ("f", '{"a": 1}'), ("g", '{"b": "é\\n"}')
CASES: list[tuple[ToolForm, str, list[object]]] = [
    ("hermes", "Hello <b>you</b> < all", ["Hello <b>you</b> < all"]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [F]),
    ("hermes", 'So:\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>\n{"name": "g", '
     '"arguments": {"b": "é\\n"}}\n</tool_call>\n', ["So:\n", F, G]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_c', [F]),
    ("hermes", "<tool_call>not JSON</tool_call> then", ["<tool_call>not JSON</tool_call> then"]),
    ("hermes", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("hermes", "a < b and <tool_", ["a < b and <tool_"]),
    ("hermes", '\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n and ', [F, "\n and "]),
    ("hermes", "\n\n so", ["\n\n so"]),
    ("hermes", "\n\n", ["\n\n"]),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "é\\n"}}]',
     [F, G]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "é\\n"}', [F, G]),
    ("mistral", "plain [TOOL] text", ["plain [TOOL] text"]),
    ("mistral", "[TOOL_CALLS] oops", ["[TOOL_CALLS] oops"]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', [F]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": "é\\n"}}',
     [F, G]),
    ("llama3", " {not a call}", [" {not a call}"]),
    ("llama3", 'It is {"name": "f"}', ['It is {"name": "f"}']),
    ("llama3", "<|pyth", ["<|pyth"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_are_found_wherever_the_text_is_divided(form: ToolForm, text: str, expected: list[object]) -> None:
    for division in range(30):
        parser, rng, found, at = ToolParser(form), random.Random(division), [], 0
        while at < len(text):
            step = rng.choice((1, 2, 7, 50)) if division else len(text)
            found += parser.add(text[at : at + step])
            at += step
        found += parser.finish()
        joined: list[object] = []
        for one in found:
            if isinstance(one, Call):
                joined.append((one.name, one.arguments))
            elif joined and isinstance(joined[-1], str):
                joined[-1] += one
            else:
                joined.append(one)
        assert joined == expected, division
        assert len({one.id for one in found if isinstance(one, Call)}) == sum(isinstance(one, Call) for one in found)


def test_the_form_is_that_of_the_template() -> None:
    assert find_form("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert find_form("{{ messages }}") == "hermes"  # prompts list tools as prepare does
    assert find_form("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]") == "mistral"
    assert find_form("{% if tools %}<|python_tag|>{% endif %}") == "llama3"
    assert find_form("{% if tools %}<tool_call><function={% endif %}") is None
    assert find_form("{% if tools %}something else{% endif %}") is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SPECS = [ToolSpec("f", SCHEMA, strict=True), ToolSpec("g", {})]


def accepts(compiler: GrammarCompiler, tokenizer, grammar, text: str) -> bool:
    mask, allowed = compiler.mask(grammar.kind, grammar.text), torch.zeros(len(tokenizer), dtype=torch.bool)
    for token in [*tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id]:
        mask.fill(allowed)
        if not allowed[token]:
            return False
        mask.accept(token)
    return mask.error is None


def test_grammars_of_calls(tiny) -> None:
    tokenizer = open_tokenizer(tiny.base)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    other = '<tool_call>\n{"name": "g", "arguments": {"x": [1]}}\n</tool_call>'
    wrong = (
        '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
        '<tool_call>{"name": "h"}</tool_call>',
    )
    required = call_grammar("hermes", SPECS, set(), required=True, several=True)
    for text, fits in ((call, True), (f"{call}\n{other}", True), ("Hello", False), *((one, False) for one in wrong)):
        assert accepts(compiler, tokenizer, required, text) == fits, text
    once = call_grammar("hermes", SPECS[:1], set(), required=True, several=False)
    assert accepts(compiler, tokenizer, once, call) and not accepts(compiler, tokenizer, once, f"{call}\n{call}")
    free = call_grammar("hermes", SPECS, set(), required=False, several=True)
    assert free is not None
    for text, fits in (("Hello <b>", True), (f"So: {call}", True), *((f"So: {one}", False) for one in wrong)):
        assert accepts(compiler, tokenizer, free, text) == fits, text
    assert call_grammar("hermes", [ToolSpec("g", {})], set(), required=False, several=True) is None
    llama = call_grammar("llama3", SPECS, set(), required=True, several=True)
    assert accepts(compiler, tokenizer, llama, '{"name": "f", "parameters": {"a": 1}}')
    mistral = call_grammar("mistral", SPECS, set(), required=True, several=True)
    assert accepts(compiler, tokenizer, mistral, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]')
    assert not accepts(compiler, tokenizer, mistral, "[TOOL_CALLS][]")


def test_a_grammar_holds_whatever_a_schema_contains() -> None:
    odd = {"type": "object", "properties": {'"/\\n%json {': {"const": "</tool_call>"}}, "description": "\n/\\\"'"}
    for form in ("hermes", "mistral", "llama3"):
        grammar = call_grammar(form, [ToolSpec("f", odd, strict=True)], set(), required=True, several=True)
        check_grammar(grammar.kind, grammar.text)
        assert json.dumps("</tool_call>") in grammar.text
