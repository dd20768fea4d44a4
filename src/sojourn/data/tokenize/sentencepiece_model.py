"""SentencePiece: learns a model, and turns any `tokenizer.model` into the tokenizer that the rest of the code uses.

The conversion reads the file itself, so that it needs neither protobuf nor transformers. What was converted is compared
with the original on probes before it is used.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL_FILE = "tokenizer.model"
_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2  # sentencepiece's numbers for its kinds of model, and of piece
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ERRORS_ONLY = 2  # sentencepiece's level of logging

# The trainer drops line ends at the end of what it is given, so they stand at the beginning; it also takes a Chinese
# paragraph for one word, and gives up at words of 65,536 characters.
_LINE = re.compile(r"[\r\n]{0,64}[^\r\n]{1,4000}|[\r\n]{1,64}")
_MAX_BYTES = 20_000
_PROBED_MARKS = 20
_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")  # which no one writes but to mean a special token
_TIE = 1e-3

_PROBES = (
    *("Hello, world! It's 12:45 on the 3rd; we'll pay $1,234.50 (ca. 20%).", " leading", "trailing ", "  two  spaces"),
    *("", " ", "   ", "\n", "\n\n\n", "\t", "a\tb\n\tc\r\nd", "line one\n\n    line two\n", "a                 b"),
    *("今天天气很好，我们去公园散步吧。", "第3章：数据与模型（共128页）", "中文 and English 混排，OK？"),
    *("日本語の文章です。カタカナ", "한국어 문장", "مرحبا بالعالم", "שלום", "नमस्ते दुनिया", "Привет, мир", "Ελληνικά"),
    *("0123456789 007 3.14159 1e-4 2024年12月31日", "I ❤️ 🍕 and 👩‍👩‍👧 🇨🇳!", "def f(x):\n    return x ** 2  # twice\n"),
    *("aaaaaaaaaaaaaaaaaaaaaaa", "hahahahahaha", "----------=======######", "...........!!!!!!?!?!?"),
    *("e\u0301 \u00e9 \ufb01 \u2460 \uff21\uff11\u3000x", "\u00a0nbsp\u2003em\u200bzero\ufeffbom", "𝔘𝔫𝔦 𠀀𠮷"),
    *("<0x41> <unk> ▁x▁", "\x00\x01\x7f", "https://example.com/a?b=c&d=%20"),
)


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class _Model:
    """What a model file says."""

    pieces: list[_Piece]
    kind: int
    byte_fallback: bool
    space_at_end: bool
    charsmap: bytes
    dummy_prefix: bool
    collapse_spaces: bool


def train(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], split_digits: bool, folder: Path
) -> Tokenizer:
    """Learns a BPE model with bytes for what is rare, and leaves it in `folder`. Little text gives a smaller one."""
    import sentencepiece

    model = io.BytesIO()
    broken: list[BaseException] = []

    def lines() -> Iterator[str]:
        try:
            for text in texts:
                yield from _LINE.findall(text)
        except BaseException as error:  # the trainer would make a RuntimeError of it
            broken.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=0.9995,
            byte_fallback=True,
            split_digits=split_digits,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=_MAX_BYTES,
            # A chat template writes its marks into the text; the model finds these there, but not control symbols.
            user_defined_symbols=list(special_tokens),
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=_ERRORS_ONLY,
        )
    except RuntimeError as error:
        raise (broken[0] if broken else _why_not_trained(str(error), vocab_size)) from None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    return convert(folder / MODEL_FILE, special_tokens)


def convert(model_file: Path, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """The same tokenizer in the form of the `tokenizers` package, with the same ids.

    Marks that are control symbols of the model, or among `special_tokens`, are found in text as one token each. Where
    the model composes characters (NFKC), rare sequences of combining marks may come out otherwise than in the original.
    """
    processor = _open(model_file)
    unfaithful = UserError(
        f"{model_file}: this SentencePiece model cannot be converted faithfully; "
        "give the folder of a tokenizer that has a tokenizer.json"
    )
    try:
        model = _read(model_file.read_bytes())
        tokenizer = _build(model, special_tokens)
    except Exception:  # tokenizers raises bare Exceptions
        raise unfaithful from None
    probes = [*_PROBES, *(f"{mark}x {mark}{mark} y" for mark in _marks(model)[:_PROBED_MARKS])]
    for text in probes:
        if not _agree(tokenizer.encode(text, add_special_tokens=False).ids, processor.encode(text), model):
            raise unfaithful
    return tokenizer


def _agree(ours: list[int], theirs: list[int], model: _Model) -> bool:
    """Where Unigram has equally good ways to cut a word, as in "......", rounding decides, and the two round apart."""
    ours_score, theirs_score = (sum(model.pieces[number].score for number in ids) for ids in (ours, theirs))
    return ours == theirs or (model.kind == _UNIGRAM and abs(ours_score - theirs_score) < _TIE)


def _why_not_trained(message: str, vocab_size: int) -> UserError:
    needs = re.search(rf"\b{vocab_size} vs (\d+)", message)
    if needs:
        return UserError(
            f"data.vocab_size: {vocab_size} is too small for SentencePiece on this data: "
            f"its characters alone take {needs[1]}; give more than that"
        )
    if "sentences_.empty()" in message:
        return UserError("data.sources: there is no text to learn a tokenizer from")
    return UserError(f"data.sources: SentencePiece cannot learn a tokenizer from this text: {message.splitlines()[0]}")


def _open(model_file: Path) -> Any:
    import sentencepiece

    if not model_file.is_file():
        raise UserError(f"{model_file}: no such file")
    sentencepiece.set_min_log_level(_ERRORS_ONLY + 1)  # what is wrong with a file is said below, once
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model_file.read_bytes())
        size = processor.get_piece_size()
    except RuntimeError:
        size = 0
    if not size:
        raise UserError(f"{model_file}: not a SentencePiece model")
    return processor


def _read(model: bytes) -> _Model:
    """The field numbers are those of sentencepiece_model.proto, which are promised never to change."""
    parts = _fields(model)
    trainer, normalizer = (_fields(parts.get(number, [b""])[-1]) for number in (2, 3))
    return _Model(
        pieces=[_piece(_fields(piece)) for piece in parts[1]],
        kind=trainer.get(3, [_UNIGRAM])[-1],
        byte_fallback=bool(trainer.get(35, [False])[-1]),
        space_at_end=bool(trainer.get(24, [False])[-1]),
        charsmap=normalizer.get(2, [b""])[-1],
        dummy_prefix=bool(normalizer.get(3, [True])[-1]),
        collapse_spaces=bool(normalizer.get(4, [True])[-1]),
    )


def _piece(fields: dict[int, list[Any]]) -> _Piece:
    (score,) = struct.unpack("<f", fields.get(2, [b"\0\0\0\0"])[-1])
    return _Piece(fields[1][-1].decode(), score, fields.get(3, [_NORMAL])[-1])


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number, as often as each is there: numbers and byte strings."""
    fields: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            fields.setdefault(key >> 3, []).append(value)
        else:
            length, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            fields.setdefault(key >> 3, []).append(message[at : at + length])
            at += length
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _build(model: _Model, special_tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    if model.kind not in (_UNIGRAM, _BPE) or model.space_at_end:
        raise ValueError("a kind of model that tokenizers does not have")
    tokenizer = Tokenizer(_bpe(model) if model.kind == _BPE else _unigram(model))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(model))
    if model.kind == _UNIGRAM:
        tokenizer.pre_tokenizer = _split(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if model.dummy_prefix else [])])
    for piece in model.pieces:
        special = piece.kind == _CONTROL or piece.text in special_tokens or bool(_SPECIAL.fullmatch(piece.text))
        if special or piece.kind == _USER_DEFINED:  # the model looks for these after it has made spaces visible
            token = AddedToken(piece.text, special=special, normalized=piece.kind == _USER_DEFINED)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def _bpe(model: _Model) -> Any:
    from tokenizers import models

    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.text for piece in model.pieces if piece.kind == _UNKNOWN)
    normal = sorted((p for p in model.pieces if p.kind == _NORMAL), key=lambda piece: -piece.score)
    words = {piece.text for piece in normal}
    merges: list[tuple[str, str]] = []
    for piece in normal:  # any two pieces that make a piece may merge, the best piece first
        word = piece.text
        pairs = [(word[:i], word[i:]) for i in range(1, len(word)) if word[:i] in words and word[i:] in words]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]])) if len(pairs) > 1 else pairs
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _unigram(model: _Model) -> Any:
    from tokenizers import models

    unknown = next(number for number, piece in enumerate(model.pieces) if piece.kind == _UNKNOWN)
    lowest = min(piece.score for piece in model.pieces if piece.kind == _NORMAL)
    scores = [(piece.text, piece.score if piece.kind == _NORMAL else lowest) for piece in model.pieces]
    return models.Unigram(scores, unknown, byte_fallback=model.byte_fallback)


def _normalizers(model: _Model) -> list[Any]:
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.collapse_spaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.dummy_prefix:
        steps.append(_prefix(_marks(model)))
    return [*steps, normalizers.Replace(" ", _SPACE)]


def _marks(model: _Model) -> list[str]:
    return [piece.text for piece in model.pieces if piece.kind == _USER_DEFINED]


def _prefix(marks: list[str]) -> Any:
    """A space before the text. A mark alone gets none: the tokenizer normalises each mark to know what to look for."""
    from tokenizers import Regex, normalizers

    if not marks:
        return normalizers.Prepend(_SPACE)
    names = "|".join(re.escape(mark) for mark in marks)
    return normalizers.Replace(Regex(rf"\A(?!(?:{names})\z)(?=[\s\S])"), _SPACE)


def _split(model: _Model) -> Any:
    """Cuts the names of reserved pieces where a text has them: this form of Unigram would take them for the pieces."""
    from tokenizers import Regex, pre_tokenizers

    names = [piece.text for piece in model.pieces if piece.kind in (_UNKNOWN, _BYTE) and len(piece.text) > 1]
    cuts = sorted({f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names})
    return pre_tokenizers.Split(Regex("|".join(cuts) or "(?!)"), "merged_with_previous")
