"""Character and byte-level tokenizers: one token for each character or byte, nothing lost."""

import pytest

from conftest import called
from sojourn.config.data import DataConfig, Source
from sojourn.data.prepare import prepare
from sojourn.data.tokenize.tokenizer import open_tokenizer

TEXT = "ROMEO:\nBut, soft! what light through yonder window breaks?\n<unk> café 你好\n"


def prepared(home, text=TEXT, **settings):
    (home / "play.txt").write_text(text, encoding="utf-8")
    source = [Source(path=str(home / "play.txt"))]
    data = DataConfig(sources=source, eval_fraction=0.0, max_length=128, **settings)
    artefact = prepare(data, home / "prepared")
    ids = artefact.train.row(0)[0]
    return artefact, open_tokenizer(artefact.tokenizer).tokenizer.decode(ids.tolist(), skip_special_tokens=True), ids


def test_a_character_tokenizer_has_each_character_of_the_text_and_loses_none(home):
    artefact, text, ids = prepared(home, tokenizer="char")
    assert artefact.vocab_size == len(set(TEXT.strip())) + 4  # end of text, two of ChatML, unknown
    assert (text, len(ids)) == (TEXT.strip(), len(TEXT.strip()) + 1)
    assert artefact.report["unknown_tokens"] == 0


def test_characters_beyond_the_vocabulary_are_unknown_and_counted(home):
    artefact, text, _ = prepared(home, "aaaa bbb cc d", tokenizer="char", vocab_size=3)
    assert (artefact.vocab_size, text) == (7, "aaaa bbb  ")
    assert artefact.report["unknown_tokens"] == 3
    args = ("smoke", "data.sources=play.txt", "data.tokenizer=char", "data.vocab_size=3")
    assert "characters that the tokenizer does not have, read as unknown: 3\n" in called("prepare", *args).stdout


def test_characters_of_evaluation_data_are_known_too(home):
    (home / "held.txt").write_text("new: ßß")
    artefact, *_ = prepared(home, tokenizer="char", eval_sources=[Source(path=str(home / "held.txt"))])
    assert artefact.report["unknown_tokens"] == 0


def test_a_vocabulary_of_256_is_one_token_for_each_byte(home):
    artefact, text, ids = prepared(home, vocab_size=256)
    assert (artefact.vocab_size, text) == (259, TEXT.strip())
    assert len(ids) == len(TEXT.strip().encode()) + 1
    said = called("prepare", "smoke", "--train_file", "play.txt", "--vocab_size", "256").stdout
    assert "tokenizer: 259 tokens, 3 of them special\n" in said


@pytest.mark.parametrize("size", [1, 65, 255])
def test_a_vocabulary_smaller_than_the_bytes_is_refused_with_the_way_out(home, size):
    (home / "play.txt").write_text(TEXT, encoding="utf-8")
    result = called("prepare", "smoke", "--train_file", "play.txt", "--vocab_size", str(size))
    assert result.returncode == 2
    assert f"data.vocab_size: {size} given" in result.stderr
    assert "data.tokenizer=char" in result.stderr


def test_chats_keep_their_special_tokens_in_a_character_tokenizer(home):
    (home / "chat.jsonl").write_text('{"prompt": "Hi <|im_end|>", "completion": "Yo"}\n')
    said = called("prepare", "smoke", "data.sources=chat.jsonl", "data.tokenizer=char", "data.eval_fraction=0").stdout
    assert "‹Yo<|im_end|>›" in said
    assert "unknown" not in said
