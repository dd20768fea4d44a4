"""Chats become exactly what plain transformers makes of them, and the mask is exactly the assistant's words."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.data.encode import encode
from sojourn.data.read.document import Document, Message
from sojourn.data.words.chat import SPECIAL_TOKENS, TURN_END, render
from sojourn.data.words.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from sojourn.errors import UserError

_TEXTS = [
    "The cat sat on 12 mats.",
    "你好，世界！今天是 2026 年。",
    "  two  spaces\n\nand lines\t",
    "émigré naïve — 🙂",
]

contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: not any(token in text for token in SPECIAL_TOKENS)
)
turns = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    documents = [Document("x", text=text * 20) for text in _TEXTS]
    save_tokenizer(train_tokenizer(documents, 400), folder, 512, chat=True)
    return folder


@pytest.fixture(scope="module")
def plain(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def _chat(pairs) -> tuple[Message, ...]:
    return tuple(m for asked, said in pairs for m in (Message("user", asked), Message("assistant", said)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns)
def test_ids_and_mask_equal_those_of_plain_transformers(tokenizer_folder, plain, pairs):
    messages = _chat(pairs)
    ours = next(encode([Document("x", messages=messages)], load_tokenizer(tokenizer_folder), "assistant"))
    theirs = plain.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.mask.tolist() == theirs["assistant_masks"]


@settings(max_examples=100, deadline=None)
@given(turns)
def test_masked_tokens_decode_to_the_assistants_words_and_the_end_of_turn(pairs):
    # An alphabet without merges: every byte is a token, so what is masked can be read off exactly.
    tokenizer = train_tokenizer([Document("x", text="")], 300)
    messages = _chat(pairs)
    encoded = next(encode([Document("x", messages=messages)], tokenizer, "assistant"))
    said = tokenizer.decode(encoded.ids[encoded.mask == 1].tolist(), skip_special_tokens=False)
    normal = tokenizer.normalizer.normalize_str
    assert said == "".join(normal(m.content) + TURN_END for m in messages if m.role == "assistant")


def test_a_text_ends_with_the_end_of_text_and_is_trained_on_whole(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    encoded = next(encode([Document("x", text="The cat")], tokenizer, "assistant"))
    assert tokenizer.decode(encoded.ids.tolist(), skip_special_tokens=False) == "The cat<|endoftext|>"
    assert encoded.mask.all()


def test_digits_are_tokens_of_their_own(tokenizer_folder):
    assert len(load_tokenizer(tokenizer_folder).encode("2026").ids) == 4


def test_a_tokenizer_without_the_templates_marks_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"<\|endoftext\|>"):
        load_tokenizer(tmp_path)


def test_rendering_shows_where_the_assistant_speaks():
    text, spans = render((Message("user", "2+2?"), Message("assistant", "4")))
    assert [text[a:b] for a, b in spans] == ["4<|im_end|>"]
