"""Vocabularies: every text survives them, both forms of a SentencePiece model agree, the report tells the truth."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import MORE
from sojourn.data import builtin
from sojourn.data.tokenize import bpe, sentencepiece_model
from sojourn.errors import UserError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = "<|im_start|>user\nhé 12 🍕?<|im_end|>\n<|im_start|>assistant\n  x\t\n\n好<|im_end|>\n"
AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "prefixed": {"model_type": "bpe", "byte_fallback": True, "allow_whitespace_only_pieces": True, **AS_IT_IS},
    "marked": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<|a|>", "▁▁"], **AS_IT_IS},
    "phrases": {"model_type": "bpe", "byte_fallback": True, "split_by_whitespace": False, **AS_IT_IS},
    "no_bytes": {"model_type": "bpe", "add_dummy_prefix": False, **AS_IT_IS},
    "unigram": {"model_type": "unigram", "byte_fallback": True, **AS_IT_IS},
    "unigram_bare": {"model_type": "unigram", "add_dummy_prefix": False, **AS_IT_IS},
    "composed": {"model_type": "unigram"},  # sentencepiece's own defaults: NFKC, spaces collapsed
    "word": {"model_type": "word"},
    "character": {"model_type": "char"},
    "suffixed": {"model_type": "bpe", "treat_whitespace_as_suffix": True, "byte_fallback": True, **AS_IT_IS},
}


@cache
def corpus(language: builtin.Language | None = None) -> list[str]:
    return [d.text for d in builtin.text(250_000, languages=(language,) if language else builtin.LANGUAGES)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model file of each kind, ours among them."""
    folder = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        file = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in corpus() for line in text.splitlines()]),
            model_writer=file,
            **{"vocab_size": 2500, "hard_vocab_limit": False, "minloglevel": 2, **options},
        )
        (folder / f"{name}.model").write_bytes(file.getvalue())
    sentencepiece_model.train(corpus(), 3000, SPECIAL_TOKENS, True, folder)
    (folder / sentencepiece_model.MODEL_FILE).rename(folder / "ours.model")
    return folder


@cache
def both(file: Path) -> tuple[Any, Any]:
    return sentencepiece_model.convert(file, SPECIAL_TOKENS), sentencepiece.SentencePieceProcessor(model_file=str(file))


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab \n\t01是的，。éz<>|x🍕A", max_size=60),
    st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|a|>x", "<unk>", "<0x41>", " ", "\n", "the", "小"]), max_size=12).map(
        "".join
    ),
    st.sampled_from(corpus()).flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[at : at + 200])),
).filter(lambda text: "<s>" not in text and "</s>" not in text)
# A converted model finds its control symbols in a text, where templates write them; SentencePiece itself does not.


def test_bytes_are_learned_the_same_way_each_time() -> None:
    first, second = (bpe.train_bpe(iter(corpus()), 1000, SPECIAL_TOKENS).to_str() for _ in range(2))
    assert first == second


def test_special_tokens_come_first_and_are_one_token_each(tmp_path: Path) -> None:
    bytelevel = bpe.train_bpe(corpus(), 1000, SPECIAL_TOKENS)
    assert [bytelevel.token_to_id(mark) for mark in SPECIAL_TOKENS] == [0, 1, 2]
    pieces = sentencepiece_model.train(corpus(), 3000, SPECIAL_TOKENS, True, tmp_path)
    assert [pieces.token_to_id(mark) for mark in SPECIAL_TOKENS] == [1, 2, 3]
    for tokenizer in (bytelevel, pieces):
        tokens = tokenizer.encode(CHAT).tokens
        assert [token for token in tokens if token in SPECIAL_TOKENS] == ["<|im_start|>", "<|im_end|>"] * 2
        assert tokenizer.decode(tokenizer.encode(CHAT).ids, skip_special_tokens=False) == CHAT
        assert "<|" not in tokenizer.decode(tokenizer.encode(CHAT).ids)


def test_digits_stand_alone_when_asked(tmp_path: Path) -> None:
    texts = ["1234567 and 2024"] * 50
    kinds = [(bpe.train_bpe(texts, 400, SPECIAL_TOKENS, split), split) for split in (True, False)]
    kinds += [
        (sentencepiece_model.train(texts, 400, SPECIAL_TOKENS, split, tmp_path), split) for split in (True, False)
    ]
    for tokenizer, split in kinds:
        runs = [token for token in tokenizer.get_vocab() if sum(c.isdigit() for c in token) > 1 and "<" not in token]
        assert bool(runs) is not split
    assert kinds[1][0].encode("1234567").tokens == ["123", "456", "7"]


def test_a_little_text_gives_a_smaller_vocabulary(tmp_path: Path) -> None:
    assert bpe.train_bpe(["ab ab"], 5000, SPECIAL_TOKENS).get_vocab_size() < 300
    assert sentencepiece_model.train(["ab ab"], 5000, SPECIAL_TOKENS, True, tmp_path).get_vocab_size() < 300


def test_learned_pieces_hold_nothing_of_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model.train([f"{CHAT}{text}" for text in corpus()], 3000, SPECIAL_TOKENS, True, tmp_path)
    assert not [piece for piece in tokenizer.get_vocab() if "im_" in piece and piece not in SPECIAL_TOKENS]


def test_line_ends_and_runs_of_spaces_are_learned(tmp_path: Path) -> None:
    code = "def f():\n\n        if x:\n                return\n" * 50
    tokenizer = sentencepiece_model.train([code], 400, SPECIAL_TOKENS, True, tmp_path)
    assert {"\n", "\n\n", "▁▁▁▁"} <= set(tokenizer.get_vocab())
    assert tokenizer.decode(ids(tokenizer, code)) == code


def test_endless_lines_are_learned_from(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model.train(["中文字" * 70_000, "xyz" * 70_000], 1000, SPECIAL_TOKENS, True, tmp_path)
    assert {"中文字", "xyz"} <= set(tokenizer.get_vocab())


def test_sentencepiece_is_learned_the_same_way_each_time(tmp_path: Path, models: Path) -> None:
    sentencepiece_model.train(iter(corpus()), 3000, SPECIAL_TOKENS, True, tmp_path)
    assert (tmp_path / sentencepiece_model.MODEL_FILE).read_bytes() == (models / "ours.model").read_bytes()


def test_sentencepiece_says_nothing(tmp_path: Path, models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sentencepiece_model.train(corpus(), 3000, SPECIAL_TOKENS, True, tmp_path)
    with pytest.raises(UserError):
        sentencepiece_model.train(corpus(), 500, SPECIAL_TOKENS, True, tmp_path)
    with pytest.raises(UserError):
        sentencepiece_model.convert(Path(__file__))
    sentencepiece_model.convert(models / "ours.model")
    assert capfd.readouterr() == ("", "")


@settings(max_examples=50 * MORE)
@given(text=TEXTS)
def test_every_text_survives_our_sentencepiece(models: Path, text: str) -> None:
    tokenizer, processor = both(models / "ours.model")
    assert ids(tokenizer, text) == processor.encode(text)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text.replace("▁", " ")


@pytest.mark.parametrize("name", ["prefixed", "marked", "phrases", "no_bytes"])
@settings(max_examples=25 * MORE, deadline=None)
@given(text=TEXTS)
def test_a_converted_bpe_gives_the_same_ids(models: Path, name: str, text: str) -> None:
    tokenizer, processor = both(models / f"{name}.model")
    assert ids(tokenizer, text) == processor.encode(text)


@pytest.mark.parametrize("name", ["unigram", "unigram_bare"])
@settings(max_examples=25 * MORE, deadline=None)
@given(text=TEXTS)
def test_a_converted_unigram_gives_the_same_ids_or_equally_good_ones(models: Path, name: str, text: str) -> None:
    tokenizer, processor = both(models / f"{name}.model")
    ours, theirs = ids(tokenizer, text), processor.encode(text)
    scores = [sum(processor.get_score(number) for number in numbers) for numbers in (ours, theirs)]
    assert ours == theirs or scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_a_unigram_with_equally_good_cuts_is_converted(tmp_path: Path) -> None:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a" * length for length in range(1, 9)] * 20),
        **{"model_writer": file, "vocab_size": 14, "hard_vocab_limit": False, "minloglevel": 2},
    )
    (tmp_path / "ties.model").write_bytes(file.getvalue())
    tokenizer, processor = both(tmp_path / "ties.model")
    assert sorted(ids(tokenizer, "a" * 23)) == sorted(processor.encode("a" * 23))


def test_a_model_that_composes_characters_is_converted(models: Path) -> None:
    tokenizer, processor = both(models / "composed.model")
    for text in corpus()[:100]:
        assert ids(tokenizer, f"  {text}\n\n ｆｕｌｌ　ﬁ ") == processor.encode(f"  {text}\n\n ｆｕｌｌ　ﬁ ")


@pytest.mark.parametrize("name", ["word", "character", "suffixed"])
def test_a_model_we_cannot_convert_is_refused(models: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"cannot be converted faithfully; give the folder .* tokenizer\.json"):
        sentencepiece_model.convert(models / f"{name}.model")


def test_a_conversion_that_differs_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sentencepiece_model, "_prefix", lambda marks: __import__("tokenizers").normalizers.Prepend("▁▁")
    )
    with pytest.raises(UserError, match="cannot be converted faithfully"):
        sentencepiece_model.convert(models / "prefixed.model")


def test_a_file_that_is_no_model_is_refused(models: Path, tmp_path: Path) -> None:
    whole = (models / "ours.model").read_bytes()
    for number, content in enumerate([b"", b"hello\n" * 20, b'{"a": 1}', b"IQ== 0\nIg== 1\n", bytes(99), whole[:5000]]):
        (tmp_path / str(number)).write_bytes(content)
        with pytest.raises(UserError, match="not a SentencePiece model"):
            sentencepiece_model.convert(tmp_path / str(number))
    with pytest.raises(UserError, match="no such file"):
        sentencepiece_model.convert(tmp_path / "none")


def test_what_stops_the_training_is_reported(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "abc"
        raise UserError("my.jsonl:7: not JSON")

    with pytest.raises(UserError, match=r"data\.vocab_size: 500 is too small .* characters alone take \d+"):
        sentencepiece_model.train(corpus(), 500, SPECIAL_TOKENS, True, tmp_path)
    with pytest.raises(UserError, match=r"data\.sources: there is no text"):
        sentencepiece_model.train(["", "\n"], 500, SPECIAL_TOKENS, True, tmp_path)
    for train in (bpe.train_bpe, lambda *given: sentencepiece_model.train(*given, True, tmp_path)):
        with pytest.raises(UserError, match=r"^my\.jsonl:7: not JSON$"):
            train(broken(), 500, SPECIAL_TOKENS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_the_compression_report_is_what_training_each_size_would_give(kind: str, tmp_path: Path) -> None:
    def train(size: int) -> Any:
        if kind == "bytes":
            return bpe.train_bpe(corpus(), size, SPECIAL_TOKENS)
        return sentencepiece_model.train(corpus(), size, SPECIAL_TOKENS, True, tmp_path)

    samples = {"en": corpus("en"), "zh": corpus("zh")}
    rows = bpe.compression(train(3000), samples)
    assert [row["vocab_size"] for row in rows] == ([750, 1500, 3000] if kind == "bytes" else [1500, 3000])
    for row in rows:
        tokenizer = train(int(row["vocab_size"]))
        size = {name: sum(len(text.encode()) for text in texts) for name, texts in samples.items()}
        tokens = {name: sum(len(ids(tokenizer, text)) for text in texts) for name, texts in samples.items()}
        assert {name: row[name] for name in samples} == pytest.approx(
            {name: size[name] / tokens[name] for name in size}
        )
        assert row["all"] == pytest.approx(sum(size.values()) / sum(tokens.values()))
    for smaller, larger in pairwise(rows):
        assert all(larger[name] >= smaller[name] for name in ("en", "zh", "all"))


def test_the_report_of_what_has_no_merges_is_one_row(models: Path) -> None:
    tokenizer, _ = both(models / "unigram.model")
    rows = bpe.compression(tokenizer, {"en": corpus("en")[:20], "none": []})
    assert [(row["vocab_size"], row["none"]) for row in rows] == [(tokenizer.get_vocab_size(), 0)]


def test_the_report_leaves_the_tokenizer_as_it_was() -> None:
    tokenizer = bpe.train_bpe(corpus(), 1000, SPECIAL_TOKENS)
    tokenizer.enable_truncation(5)
    before = tokenizer.to_str()
    assert bpe.compression(tokenizer, {"en": [corpus("en")[0]]})[-1]["en"] < 20
    assert tokenizer.to_str() == before


def test_chinese_words_are_tokens_not_bytes(tmp_path: Path) -> None:
    pieces = sentencepiece_model.train(corpus("zh"), 3000, SPECIAL_TOKENS, True, tmp_path)
    text = "".join(corpus("zh"))
    in_bytes = sum(token.startswith("<0x") for token in pieces.encode(text).tokens) / 3
    assert in_bytes / len(text) < 0.001  # the rarest characters alone
    for tokenizer in (pieces, bpe.train_bpe(corpus("zh"), 3000, SPECIAL_TOKENS)):  # a Chinese character is three bytes
        assert bpe.compression(tokenizer, {"zh": corpus("zh")})[-1]["zh"] > 4


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("beside_a_model", [True, False])
def test_plain_transformers_gives_the_same_ids(kind: str, beside_a_model: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    if kind == "bytes":
        tokenizer = bpe.train_bpe(corpus(), 1000, SPECIAL_TOKENS)
    else:
        tokenizer = sentencepiece_model.train(corpus(), 3000, SPECIAL_TOKENS, True, tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # LlamaTokenizer here would build its own from tokenizer.json's parts, with other ids.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if beside_a_model:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    opened = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*corpus()[:50], CHAT, "", " ", "\n\n", "  a  b ", "<unk> <0x41>", "\0é🍕"):
        assert opened(text)["input_ids"] == tokenizer.encode(text).ids
        assert opened.decode(opened(text)["input_ids"]) == text
    assert (opened.eos_token_id, opened.pad_token_id) == tuple(
        tokenizer.token_to_id(mark) for mark in SPECIAL_TOKENS[2::-2]
    )
