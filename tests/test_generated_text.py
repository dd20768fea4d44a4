"""Text as it is generated: pieces add up to the whole, never half a character, and end before a stop string."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.data.tokenize.bpe import train_bpe
from sojourn.infer.detokenize import Detokenizer
from sojourn.infer.stop_strings import StopStrings

TEXT = "The cat — naïve, 你好，世界 🙂👩‍👩‍👧 sat. It's 12 o'clock; 3.5 €!\n\n  def f(x):\n\treturn x\n"


def decoders(folder: Path) -> dict:
    from sojourn.data.tokenize import sentencepiece_model

    tokens = ["<|endoftext|>", "<|im_end|>"]
    bpe = train_bpe([TEXT] * 3, 330, tokens)
    piece = sentencepiece_model.train(iter([TEXT] * 30), 360, tokens, True, folder)
    return {"bpe": bpe, "sentencepiece": piece}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return decoders(tmp_path_factory.mktemp("tokenizers"))


def decode_with(tokenizer: object):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["bpe", "sentencepiece"])
def test_pieces_add_up_to_the_whole_text(name: str, tokenizers: dict) -> None:
    decode = decode_with(tokenizers[name])
    ids = tokenizers[name].encode(TEXT, add_special_tokens=False).ids
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) == decode(ids) and detokenizer.finish() == ""
    assert not any("\ufffd" in piece for piece in pieces)  # characters of several tokens come whole


@pytest.mark.parametrize("name", ["bpe", "sentencepiece"])
def test_pieces_of_any_tokens_add_up(name: str, tokenizers: dict) -> None:
    """Bytes that are no character, special tokens in the middle: whatever a model may generate. But SentencePiece's
    decoder replaces all bytes of a run that has a wrong one, which were given out by then: no such runs there."""
    tokenizer, rng = tokenizers[name], random.Random(1)
    decode = decode_with(tokenizer)
    single = [[token] for token in range(tokenizer.get_vocab_size())]
    if name == "sentencepiece":
        single = [[at] for (at,) in single if not tokenizer.id_to_token(at).startswith("<0x")]
        single += [tokenizer.encode(character, add_special_tokens=False).ids for character in "é世🙂€字"] * 20
    for _ in range(300):
        ids = [token for _ in range(rng.randrange(1, 30)) for token in rng.choice(single)]
        detokenizer = Detokenizer(decode)
        pieces = [detokenizer.add(token) for token in ids]
        assert "".join(pieces) + detokenizer.finish() == decode(ids)


def test_bytes_that_never_become_a_character_do_not_pile_up(tokenizers: dict) -> None:
    """Each token is decoded with a few others, however long the text is."""
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return tokenizers["bpe"].decode(ids)

    detokenizer = Detokenizer(decode)
    ids = tokenizers["bpe"].encode(TEXT * 20, add_special_tokens=False).ids
    for token in ids:
        detokenizer.add(token)
    assert max(lengths) < 16


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 2**20),
)
def test_a_text_ends_before_its_first_stop_string_wherever_it_is_divided(
    text: str, stops: list[str], cuts: int
) -> None:
    stopping, given_out, place = StopStrings(stops), "", 0
    pieces = []
    for at in range(1, len(text) + 1):
        if cuts >> at % 20 & 1 or at == len(text):
            pieces.append(text[place:at])
            place = at
    for piece in pieces:
        given_out += stopping.add(piece)
        if stopping.stopped:
            break
    else:
        given_out += stopping.finish()
    found = [text.find(stop) for stop in stops if stop in text]
    assert stopping.stopped == bool(found)
    if not found:
        assert given_out == text
    else:  # the first stop string to be complete; another may have started before it
        assert text.startswith(given_out) and len(given_out) >= min(found)
        assert any(text.startswith(stop, len(given_out)) for stop in stops)
        assert not any(stop in given_out for stop in stops)


def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else() -> None:
    stops = StopStrings(["\n\nUser:", "END"])
    assert [stops.add(piece) for piece in ("Hello", " E", "N", "O", "\n", "\nUse", "d")] == [
        "Hello", " ", "", "ENO", "", "", "\n\nUsed",
    ]  # fmt: skip
    assert stops.add("\n\nUser: more") == "" and stops.stopped and stops.add("later") == ""


def test_a_stop_string_may_be_half_of_a_token_or_a_character_of_several(tokenizers: dict) -> None:
    tokenizer = tokenizers["bpe"]
    for stop in ("世", "👩", "clo", "🙂👩"):
        detokenizer, stopping, text = Detokenizer(decode_with(tokenizer)), StopStrings([stop]), ""
        for token in tokenizer.encode(TEXT, add_special_tokens=False).ids:
            text += stopping.add(detokenizer.add(token))
            if stopping.stopped:
                break
        assert stopping.stopped and text == TEXT[: TEXT.index(stop)]
