"""The model is trained on exactly what the assistant says and on the end of its turn, whichever template writes it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from shared import MORE
from sojourn.config.data import DataConfig
from sojourn.data.encode import Encoder, EncoderConfig
from sojourn.data.prepare import prepare
from sojourn.data.sources.chunks import Chunk
from sojourn.data.sources.document import Document, Message
from sojourn.data.sources.values import BadRecord
from sojourn.data.tokenize import sentencepiece_model
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.tokenizer import TokenizerBundle, open_tokenizer
from sojourn.data.truncate import LengthPolicy
from sojourn.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = (
    "The cat sat on 12 mats, and the user asked the assistant about it.\n\nassistant\nuser\nsystem\n model\n",
    "你好，世界！今天是 2026 年。\n",
    "  two  spaces\n\nand lines\t [INST] What? [/INST] This. ### user:\n",
    "émigré naïve — 🙂 <tool_call>\n{'name': 'f'}\n</tool_call> <think>",
)
MARKS = ("<tool_call>", "</tool_call>")  # tokens that are not special: an answer may end in one


@dataclass(frozen=True)
class Kind:
    """A tokenizer with its template, and what the template does to contents."""

    name: str
    end: str
    tokens: tuple[str, ...]
    choice: str = "auto"
    own: str | None = None
    bos: str | None = None
    trims: bool = False
    alternates: bool = False  # user and assistant must take turns
    knows_system: bool = True
    lead: str = ""  # what may share a token with the beginning of an answer
    pieces: bool = False  # SentencePiece, not bytes
    marks: tuple[str, ...] = ()


_CHATML, _EOT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|eot_id|>"
_LLAMA = ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", _EOT)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("chatml", "<|im_end|>", _CHATML, "chatml"),
        Kind("chatml-sentencepiece", "<|im_end|>", _CHATML, "chatml", pieces=True),
        Kind("llama3", _EOT, _LLAMA, "llama3", bos="<|begin_of_text|>"),
        Kind("plain", "<|endoftext|>", ("<|endoftext|>",), "plain"),
        Kind("smol", "<|im_end|>", _CHATML, own="smol", marks=MARKS),
        Kind("header", _EOT, _LLAMA, own="header", bos="<|begin_of_text|>", trims=True),
        Kind("inst", "</s>", ("<s>", "</s>"), own="inst", bos="<s>", alternates=True, lead=" "),
        Kind(
            "turn", "<end_of_turn>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), own="turn", bos="<bos>",
            trims=True, alternates=True, knows_system=False,
        ),
        Kind("phi", "<|end|>", ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), own="phi"),
        Kind("thinking", "<|im_end|>", _CHATML, own="thinking", marks=MARKS),
    )
}  # fmt: skip
_ROOM = TemporaryDirectory(prefix="words-")  # gone with the process
OURS = [name for name, kind in KINDS.items() if kind.own is None]
quickly = settings(max_examples=8 * MORE)


@cache
def words_of(name: str) -> TokenizerBundle:
    kind, folder = KINDS[name], Path(_ROOM.name) / name
    folder.mkdir()
    if kind.pieces:
        tokenizer = sentencepiece_model.train(iter(CORPUS * 50), 420, kind.tokens, True, folder)
    else:
        tokenizer = train_bpe(CORPUS * 3, 500, kind.tokens)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in kind.marks])
    end = "<|endoftext|>" if "<|endoftext|>" in kind.tokens else kind.end
    given = {"eos_token": end, "pad_token": end, **({"bos_token": kind.bos} if kind.bos else {})}
    TokenizerBundle(given, trained=tokenizer).save(folder, None, 512)
    (folder / "tokenizer_config.json").write_text(json.dumps(given), encoding="utf-8")
    (folder / "tokenizer.model").unlink(missing_ok=True)
    if kind.own:
        (folder / "chat_template.jinja").write_text(source_of(kind.own), encoding="utf-8")
    return open_tokenizer(folder)


def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def template_of(name: str):
    return words_of(name).template(KINDS[name].choice)


@cache
def encoder_of(name: str, train_on: str = "assistant", fail: bool = False) -> Encoder:
    words, template = words_of(name), template_of(name)
    policy = LengthPolicy(1_000_000, "split", "drop", words.id_of(words.end_of_text))
    return Encoder(
        EncoderConfig(
            str(words.fast_file),
            template.source,
            words.special_names,
            words.added_tokens,
            train_on,
            policy,
            fail,
            language_sample=0,
        )
    )


def encoded(name: str, messages, tools=(), train_on: str = "assistant"):
    """Ids and mask of a chat. Raises BadRecord."""
    document = Document("x:1", messages=tuple(messages), tools=tuple(tools))
    found = encoder_of(name, train_on)(Chunk("x", "documents", [1], [document]))
    if found.bad:
        raise BadRecord(found.bad[0][1])
    return found.ids.tolist(), found.mask.tolist()


def text_of(name: str, ids) -> str:
    return str(words_of(name).tokenizer.decode(ids, skip_special_tokens=False))


def runs(name: str, ids, mask) -> list[str]:
    """What is trained on, each stretch as text."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2)
    return [text_of(name, ids[a:b]) for a, b in edges.tolist()]


def said(name: str, message: Message) -> str:
    """What training on this turn of the assistant must teach."""
    kind, content = KINDS[name], message.content
    normalizer = None if kind.pieces else words_of(name).tokenizer.normalizer
    parts = re.split(f"({'|'.join(map(re.escape, kind.tokens))})", content.strip() if kind.trims else content)
    return "".join(normalizer.normalize_str(part) if normalizer else part for part in parts) + kind.end


def same(name: str, found: list[str], wanted: list[str]) -> bool:
    lead = KINDS[name].lead
    return len(found) == len(wanted) and all(
        one == other or one == lead + other for one, other in zip(found, wanted, strict=True)
    )


def without_specials(name: str, message: Message) -> Message:
    return Message(message.role, re.sub("|".join(map(re.escape, KINDS[name].tokens)), "x", message.content))


def special_ids(name: str, ids) -> list[int]:
    numbers = {words_of(name).tokenizer.token_to_id(token) for token in KINDS[name].tokens}
    return [number for number in ids if number in numbers]


# Chats

_FRAGMENTS = (
    "", " ", "\n", "\n\n", "  ", "\t", "assistant", "assistant\n", "user\n", "user", "system\n", "model\n", "### ",
    "### user:\n", "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|endoftext|>", "</s>",
    "<|end_of_text|>", "<s>", "<end_of_turn>", "<start_of_turn>model\n", "<|end|>", "<|user|>\n", "[INST]", " [/INST]",
    "<|im_", "end|>", "<", "|>", "Hello", "Hello", "12", "你好", "，世界！", "🙂", "e\u0301", "\u0301", "{{ x }}",
    "{% if %}", "</tool_call>", "<tool_call>", "<tool_call>\n{}\n</tool_call>", "'", '"', "\\n", "\u00a0", "\u3000",
    "\u2028", "\u200b", "\x00", "\x1c", "\r\n", "\r",
)  # fmt: skip
roles = st.sampled_from(["system", "user", "assistant", "tool"])
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1\ufdd2\ufdd3")
contents = st.lists(st.sampled_from(_FRAGMENTS) | st.text(characters, max_size=5), max_size=4).map("".join)


@st.composite
def chats(draw, kind: Kind, words=contents):
    """A chat that the template takes; some of its contents are alike."""
    said_before: list[str] = []

    def content() -> str:
        if said_before and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(said_before))
        said_before.append(draw(words))
        return said_before[-1]

    roles = ["user", "assistant"] * draw(st.integers(1, 3))
    if not kind.alternates and draw(st.booleans()):
        roles = [*draw(st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=4)), "assistant"]
        roles = ["user", *roles] if kind.name == "thinking" else roles
    if kind.knows_system and draw(st.booleans()):
        roles = ["system", *roles]
    return tuple(Message(role, content()) for role in roles)


def each_kind(names=tuple(KINDS)):
    return pytest.mark.parametrize("name", names)


# What is trained on


@each_kind()
@quickly
@given(data=st.data())
def test_trained_tokens_are_the_assistants_words_and_the_end_of_turn(name, data):
    messages = data.draw(chats(KINDS[name]))
    ids, mask = encoded(name, messages)
    wanted = [said(name, m) for m in messages if m.role == "assistant"]
    assert same(name, runs(name, ids, mask), wanted)
    harmless = template_of(name).text([without_specials(name, m) for m in messages])
    put_there = re.findall("|".join(map(re.escape, KINDS[name].tokens)), harmless)
    assert special_ids(name, ids) == [words_of(name).tokenizer.token_to_id(token) for token in put_there]


@each_kind()
@quickly
@given(data=st.data())
def test_train_on_last_trains_on_the_last_answer_alone(name, data):
    messages = data.draw(chats(KINDS[name]))
    ids, mask = encoded(name, messages, train_on="last")
    assert same(name, runs(name, ids, mask), [said(name, messages[-1])])
    assert text_of(name, ids) == text_of(name, encoded(name, messages)[0])


@each_kind()
@quickly
@given(data=st.data())
def test_an_answer_of_weight_zero_is_read_but_not_trained_on(name, data):
    messages = list(data.draw(chats(KINDS[name])))
    answers = [number for number, m in enumerate(messages) if m.role == "assistant"]
    quiet = data.draw(st.sets(st.sampled_from(answers)))
    marked = [Message(m.role, m.content, trained=number not in quiet) for number, m in enumerate(messages)]
    wanted = [said(name, m) for m in marked if m.role == "assistant" and m.trained]
    if not wanted:
        with pytest.raises(BadRecord, match="nothing in this example is trained on"):
            encoded(name, marked)
        return
    ids, mask = encoded(name, marked)
    assert same(name, runs(name, ids, mask), wanted)
    assert text_of(name, ids) == text_of(name, encoded(name, messages)[0])


@each_kind()
@quickly
@given(data=st.data())
def test_train_on_all_trains_on_every_token_but_the_first(name, data):
    ids, mask = encoded(name, data.draw(chats(KINDS[name])), train_on="all")
    assert mask == [0] + [1] * (len(ids) - 1)


@each_kind([name for name, kind in KINDS.items() if not kind.pieces])
@quickly
@given(data=st.data())
def test_ids_are_those_of_the_whole_text_if_answers_start_with_words(name, data):
    """And have no special token's text in them. SentencePiece may join a line's end with what begins the next line."""
    kind = KINDS[name]
    messages = data.draw(chats(kind))
    assume(not any(token in m.content for m in messages for token in kind.tokens))
    assume(not any(m.content[:1].isspace() for m in messages if m.role == "assistant"))
    text = template_of(name).text(messages)
    assert encoded(name, messages)[0] == words_of(name).tokenizer.encode(text, add_special_tokens=False).ids


@each_kind()
@quickly
@given(st.lists(st.builds(Message, roles, contents), min_size=1, max_size=5), contents)
def test_a_chat_that_a_template_rejects_is_a_bad_record_and_nothing_worse(name, messages, answer):
    messages = (*messages, Message("assistant", answer))
    try:
        ids, mask = encoded(name, messages)
    except BadRecord as error:
        assert str(error).strip() and "\n" not in str(error)
        assert KINDS[name].alternates or name == "thinking"
    else:
        assert len(ids) == len(mask) and any(mask)


def test_a_rejection_has_the_message_of_the_template():
    with pytest.raises(BadRecord, match="the chat template rejects it: roles must alternate"):
        encoded("turn", [Message("user", "a"), Message("user", "b"), Message("assistant", "c")])
    with pytest.raises(BadRecord, match="the chat template rejects it: no system role here"):
        encoded("turn", [Message("system", "a"), Message("user", "b"), Message("assistant", "c")])


# Tools and reasoning

_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks 看", "parameters": {"type": "object"}}}
CALL = {"name": "look", "arguments": {"at": "x"}}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | contents,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(contents, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(lambda a: {"name": "look", "arguments": a}, st.dictionaries(contents, json_values, max_size=2))


@each_kind(["chatml", "llama3", "plain", "smol", "phi", "header"])
@quickly
@given(words=contents, called=st.lists(calls, min_size=1, max_size=2), answer=contents)
def test_a_tool_call_is_trained_on_with_its_tags_and_its_answer_is_not(name, words, called, answer):
    messages = (
        Message("user", "Look!"),
        Message("assistant", words, tuple(called)),
        Message("tool", "found"),
        Message("assistant", answer),
    )
    ids, mask = encoded(name, messages, [_TOOL])
    found = runs(name, ids, mask)
    written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in called]
    assert found[0] == said(name, Message("assistant", "\n".join([words, *written] if words else written)))
    assert found[1:] == [said(name, messages[-1])]


@quickly
@given(words=contents, called=calls)
def test_a_tool_call_that_ends_a_chat_is_trained_on(words, called):
    written = f"\n<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"
    ids, mask = encoded("thinking", (Message("user", "Look!"), Message("assistant", words, (called,))), [_TOOL])
    wanted = said("thinking", Message("assistant", words + written))
    assert runs("thinking", ids, mask) == [wanted]


def test_a_tool_call_is_trained_on_where_a_template_writes_the_last_turn_otherwise():
    messages = (
        Message("user", "Look!"),
        Message("assistant", "", (CALL,)),
        Message("tool", "found"),
        Message("assistant", "a"),
    )
    found = runs("thinking", *encoded("thinking", messages, [_TOOL]))
    assert len(found) == 2 and found[1].endswith("a<|im_end|>")
    assert found[0] == f"\n<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>"


@each_kind(["chatml", "llama3", "plain", "smol", "thinking"])
def test_special_tokens_in_tool_calls_tools_and_reasoning_are_only_text(name):
    end = KINDS[name].end
    turn = Message("assistant", "a", ({"name": "look", "arguments": {"at": f"x{end}y"}},), f"hm {end}")
    tool = {"type": "function", "function": {"name": "look", "description": f"Looks {end}"}}
    messages = (Message("user", "Look!"), turn)
    ids, mask = encoded(name, messages, [tool])
    harmless = (Message("user", "Look!"), Message("assistant", "a", ({"name": "look", "arguments": {}},), "hm"))
    plain_tool = {"type": "function", "function": {"name": "look", "description": "Looks"}}
    assert special_ids(name, ids) == special_ids(name, encoded(name, harmless, [plain_tool])[0])
    assert f"x{end}y" in runs(name, ids, mask)[0] and f"hm {end}" in runs(name, ids, mask)[0]


@each_kind(["chatml", "llama3", "plain", "smol", "thinking"])
def test_reasoning_is_trained_on_before_the_answer(name):
    messages = (Message("user", "2+2?"), Message("assistant", "4", reasoning="two and two"))
    ids, mask = encoded(name, messages)
    assert runs(name, ids, mask) == ["<think>\ntwo and two\n</think>\n\n4" + KINDS[name].end]


def test_a_template_that_drops_earlier_reasoning_trains_only_on_the_last_answer():
    earlier = (Message("user", "2+2?"), Message("assistant", "4", reasoning="two and two"))
    messages = (*earlier, Message("user", "3+3?"), Message("assistant", "6", reasoning="three and three"))
    with pytest.raises(BadRecord, match=r"rewrites message 2 .*data\.train_on=last"):
        encoded("thinking", messages)
    ids, mask = encoded("thinking", messages, train_on="last")
    assert runs("thinking", ids, mask) == ["<think>\nthree and three\n</think>\n\n6<|im_end|>"]
    assert "two and two" not in words_of("thinking").tokenizer.decode(ids)


@each_kind(["smol", "thinking"])
@pytest.mark.parametrize("mark", MARKS)
def test_an_answer_that_ends_in_a_token_of_the_vocabulary_still_learns_to_stop(name, mark):
    messages = (
        Message("user", "a"),
        Message("assistant", f"b{mark}"),
        Message("user", "c"),
        Message("assistant", mark),
    )
    ids, mask = encoded(name, messages)
    assert runs(name, ids, mask) == [f"b{mark}<|im_end|>", f"{mark}<|im_end|>"]


# Our templates are what any program renders


def as_dicts(messages):
    found = []
    for m in messages:
        calls = [{"type": "function", "function": call} for call in m.tool_calls]
        found.append({"role": m.role, "content": m.content, **({"tool_calls": calls} if calls else {})})
    return found


@st.composite
def chats_with_tools(draw, kind):
    messages = list(draw(chats(kind)))
    if draw(st.booleans()):
        called = Message("assistant", draw(contents), tuple(draw(st.lists(calls, min_size=1, max_size=2))))
        messages[-1:] = [called, Message("tool", draw(contents)), messages[-1]]
    return tuple(messages), [_TOOL] * draw(st.integers(0, 2))


@each_kind(OURS)
@quickly
@given(data=st.data())
def test_our_templates_render_as_plain_transformers_does(name, data):
    from transformers.utils.chat_template_utils import render_jinja_template

    template = template_of(name)
    messages, tools = data.draw(chats_with_tools(KINDS[name]))
    names = words_of(name).special_names
    given = {"tools": tools or None, "chat_template": template.source, **names}
    theirs = render_jinja_template([as_dicts(messages)], **given)[0][0]
    assert template.text(messages, tools) == template.spans(messages, tools)[0] == theirs
    asked = [m for m in messages if m.role != "assistant"] or [Message("user", "?")]
    theirs = render_jinja_template([as_dicts(asked)], add_generation_prompt=True, **given)[0][0]
    assert template.text(asked, tools, prompt=True) == theirs


@each_kind(OURS)
@quickly
@given(data=st.data())
def test_our_quick_filling_is_what_jinja_renders(name, data):
    template, words = template_of(name), words_of(name)
    messages = data.draw(chats(KINDS[name]))
    slow = Template(template.source + "{# not ours, so never filled #}", words.special_names, words.added_tokens)
    assert template.spans(messages) == slow.spans(messages)
    assert template.text(messages) == slow.text(messages)


@each_kind([name for name, kind in KINDS.items() if kind.own])
@quickly
@given(data=st.data())
def test_an_own_template_renders_as_plain_transformers_does(name, data):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = data.draw(chats(KINDS[name]))
    given = {"chat_template": source_of(KINDS[name].own), **words_of(name).special_names}
    assert template_of(name).spans(messages)[0] == render_jinja_template([as_dicts(messages)], **given)[0][0]


@each_kind(["chatml", "llama3", "plain"])
def test_a_saved_tokenizer_gives_plain_transformers_the_same_ids_and_mask(name, tmp_path):
    from transformers import AutoTokenizer

    words_of(name).save(tmp_path, template_of(name), 512)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = [Message("system", "Be kind."), *(Message(role, "你好 12 🙂") for role in ("user", "assistant") * 2)]
    found = theirs.apply_chat_template(
        as_dicts(chat), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (found["input_ids"], found["assistant_masks"]) == encoded(name, chat)


# Templates that cannot be used


@pytest.fixture
def ready(tmp_path):
    """Prepares chats with a tokenizer of few tokens: ready(template=…, tokenizer=…, records=…)."""

    def ready(records=({"prompt": "a", "completion": "b"},), tokens=("<|endoftext|>",), own=None, **more):
        folder = tmp_path / "tokenizer"
        TokenizerBundle({"eos_token": tokens[0]}, trained=train_bpe(CORPUS, 300, tokens)).save(folder, None, 64)
        if own is not None:
            (folder / "chat_template.jinja").write_text(own, encoding="utf-8")
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        given = {"sources": [{"path": str(path)}], "tokenizer": str(folder), "workers": 1, "eval_fraction": 0, **more}
        return prepare(DataConfig(**given), tmp_path / "prepared")

    return ready


def test_a_template_whose_tokens_are_missing_is_refused_by_their_names(ready):
    with pytest.raises(UserError, match=r"chatml needs <\|im_start\|>, <\|im_end\|>, which .*data\.template=plain"):
        ready(template="chatml")


def test_an_unknown_template_gets_a_suggestion(ready):
    with pytest.raises(UserError, match=r"“chatm”: no such template; did you mean chatml\?; allowed: auto, chatml"):
        ready(template="chatm")


def test_a_tokenizer_of_no_family_is_refused_with_what_to_type(ready):
    with pytest.raises(UserError, match=r"no chat template and belongs to no known family.*data\.template=plain"):
        ready()


def test_a_tokenizer_of_a_family_gets_its_template(ready):
    artefact = ready(tokens=_CHATML)
    assert "<|im_start|>" in (artefact.tokenizer / "tokenizer_config.json").read_text(encoding="utf-8")
    text = open_tokenizer(artefact.tokenizer).tokenizer.decode(artefact.train.tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"


@pytest.mark.parametrize("tokenizer", [None, "auto"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{% for m in messages %}{{ m.content }", "data.template: .*not a valid Jinja template"),
        (b"{{ nothing.at.all }}", "data.template: .*the chat template rejects it: 'nothing' is undefined"),
        (b"{% for m in messages %}{{ m.content }}\n{% endfor %}", "no end-of-turn token"),
        (b"Hello<|endoftext|>", "data.template: "),
        (b"", "data.template: "),
        (b"\xff\xfe", "not UTF-8"),
    ],
    ids=["broken", "undefined", "endless", "deaf", "empty", "bytes"],
)
def test_a_template_file_that_cannot_work_is_refused(ready, tmp_path, content, told, tokenizer):
    path = tmp_path / "my.jinja"
    path.write_bytes(content)
    with pytest.raises(UserError, match=told):
        ready(template=str(path), **({"tokenizer": tokenizer, "vocab_size": 300} if tokenizer else {}))


def test_a_template_of_the_tokenizer_without_an_end_of_turn_is_refused(ready):
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match=r"no end-of-turn token follows.*data\.template=chatml"):
        ready(own=endless)


def test_a_tokenizers_template_that_is_no_text_is_refused(ready, tmp_path):
    ready(template="plain")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template\.jinja.*UTF-8"):
        ready(template="auto")


@pytest.mark.parametrize("name", ["turn", "inst"])
def test_a_template_that_refuses_a_system_turn_still_prepares_chats_without_one(ready, name):
    artefact = ready(tokens=("<eos>", *KINDS[name].tokens), own=source_of(name))
    assert len(artefact.train) == 1


# Examples with nothing to learn

_QUIET = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
_HEARD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]}


def test_an_example_without_a_trained_token_is_an_error_that_says_where(ready):
    with pytest.raises(UserError, match=r"chats\.jsonl:2: nothing in this example is trained on.*data\.on_bad=skip"):
        ready([_HEARD, _QUIET], template="plain")


def test_an_example_without_a_trained_token_is_counted_if_such_are_to_be_skipped(ready):
    artefact = ready([_HEARD, _QUIET], template="plain", on_bad="skip")
    assert artefact.report["damaged"] == 1 and artefact.report["train"]["documents"] == 1
    assert artefact.report["damaged_examples"][0][1] == "nothing in this example is trained on"


def test_a_chat_that_the_template_refuses_is_skipped_wherever_it_stands(ready):
    bad = {"messages": [{"role": role, "content": "a"} for role in ("user", "user", "assistant")]}
    good = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    for records in ([good, bad, good], [bad, good, good]):
        artefact = ready(records, tokens=("<eos>", *KINDS["inst"].tokens), own=source_of("inst"), on_bad="skip")
        assert artefact.report["damaged"] == 1 and artefact.report["train"]["documents"] == 2


def test_a_tokenizer_is_trained_around_a_chat_that_the_template_refuses(ready, tmp_path):
    path = tmp_path / "picky.jinja"
    path.write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}",
        encoding="utf-8",
    )
    records = [{"prompt": word, "completion": "b"} for word in ("a", "b", "c", "d", "no")]
    artefact = ready(records, tokenizer="auto", vocab_size=300, template=str(path), on_bad="skip")
    assert artefact.report["damaged"] == 1
