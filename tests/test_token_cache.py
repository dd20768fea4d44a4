"""Tokens from the cache are the tokens of the tokenizer itself, whatever the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared import MORE
from sojourn.data import builtin
from sojourn.data.tokenize import sentencepiece_model, token_cache
from sojourn.data.tokenize.bpe import train_bpe
from sojourn.data.tokenize.token_cache import TokenCache, ids_to_bytes, supports_token_cache

_ODD = [
    "a", "b", "The", " cat", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\r", "'s", "'LL", "1", "23", ".", ",", "()", "_",
    "=", "中文", "，", "é", "\u0301", "\u00a0", "\u2003", "\u3000", "\x1c", "\x1f", "\x85", "\u2028", "Ⅷ", "²", "ß",
    "ſ", "🙂", "<tool_call>", "<", ">", "|", "\x00", "▁", "-", "#", "K",
]  # fmt: skip
texts = st.lists(st.sampled_from(_ODD) | st.text(max_size=3), max_size=30).map("".join)


def _texts():
    return (one.text for one in builtin.text(300_000, languages=list(builtin.LANGUAGES)))


def _gpt2(digits: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), cut]) if digits else cut
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _texts(), trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {
        "qwen2": train_bpe(_texts(), 2000, ["<|endoftext|>"], True),
        "llama3": train_bpe(_texts(), 2000, ["<|endoftext|>"], False),
        "gpt2": _gpt2(False),
        "digits": _gpt2(True),
        "sentencepiece": sentencepiece_model.train(
            _texts(), 2000, ["<|endoftext|>"], True, tmp_path_factory.mktemp("sp")
        ),
    }
    for tokenizer in made.values():
        tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return made


@pytest.mark.parametrize("kind", ["qwen2", "llama3", "gpt2", "digits", "sentencepiece"])
def test_pieces_from_the_cache_are_the_tokens_of_the_whole(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert supports_token_cache(tokenizer)
    cache = TokenCache(tokenizer)

    @settings(max_examples=50 * MORE, deadline=None)
    @given(st.lists(texts, max_size=4))
    def check(some):
        whole = tokenizer.encode_batch(some, add_special_tokens=False)
        assert cache(some) == [ids_to_bytes(one.ids) for one in whole]

    check()


def test_what_is_evicted_is_tokenized_again(tokenizers, monkeypatch):
    monkeypatch.setattr(token_cache, "_MAX_CACHED_PIECES", 20)
    cache, some = TokenCache(tokenizers["qwen2"]), list(_texts())[:50]
    whole = [ids_to_bytes(one.ids) for one in tokenizers["qwen2"].encode_batch(some, add_special_tokens=False)]
    for _ in range(2):
        assert cache(some) == whole
    assert len(cache._cached) <= 20


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: t.add_tokens(["two words"]),
    ],
    ids=["prefix", "other split", "whitespace", "token with a space"],
)  # fmt: skip
def test_a_tokenizer_that_splits_otherwise_gets_whole_texts(spoil):
    tokenizer = _gpt2(False)
    spoil(tokenizer)
    assert not supports_token_cache(tokenizer)
