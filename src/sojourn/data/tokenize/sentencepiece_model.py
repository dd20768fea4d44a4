"""SentencePiece: trains a model, and converts any `tokenizer.model` to a tokenizer of the `tokenizers` package.

The file is parsed by sentencepiece's own protobuf classes. The conversion is ours: transformers has one class per
model family, this one follows what the file says, and its ids are compared with SentencePiece's on probes before it is
used.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL_FILE = "tokenizer.model"
_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2  # ModelType and Piece.Type of sentencepiece_model.proto
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_LOG_ERRORS = 2

# What the trainer gets at a time. It drops newlines at the end of a sentence, so they go to the beginning of the next.
# It takes a Chinese paragraph for one word and fails at words of 65,536 characters, hence at most 4,000.
_SENTENCE = re.compile(r"[\r\n]{0,64}[^\r\n]{1,4000}|[\r\n]{1,64}")
_MAX_SENTENCE_BYTES = 20_000
_MAX_PROBED_SYMBOLS = 20
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
_SCORE_TOLERANCE = 1e-3

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


def train(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], split_digits: bool, folder: Path
) -> Tokenizer:
    """Trains a BPE model with byte fallback and writes it to `folder`. With little text the vocabulary is smaller."""
    import sentencepiece

    model = io.BytesIO()
    errors: list[BaseException] = []

    def sentences() -> Iterator[str]:
        try:
            for text in texts:
                yield from _SENTENCE.findall(text)
        except BaseException as error:  # the trainer turns it into a RuntimeError
            errors.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
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
            max_sentence_length=_MAX_SENTENCE_BYTES,
            # Chat templates write special tokens as text, where SentencePiece finds only user-defined symbols.
            user_defined_symbols=list(special_tokens),
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            minloglevel=_LOG_ERRORS,
        )
    except RuntimeError as error:
        raise (errors[0] if errors else _training_error(str(error), vocab_size)) from None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_bytes(model.getvalue())
    return convert(folder / MODEL_FILE, special_tokens)


def convert(model_file: Path, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A `tokenizers` tokenizer with the same ids.

    Control symbols of the model and `special_tokens` become special tokens, so they are found in text. Where the model
    normalizes to NFKC, rare sequences of combining marks may give other ids than the original.
    """
    processor = _open(model_file)
    unfaithful = UserError(
        f"{model_file}: this SentencePiece model cannot be converted faithfully; "
        "give the folder of a tokenizer that has a tokenizer.json"
    )
    model = _parse(model_file.read_bytes())
    try:
        tokenizer = _build(model, special_tokens)
    except Exception:  # tokenizers raises bare Exceptions
        raise unfaithful from None
    symbols = _user_defined(model)[:_MAX_PROBED_SYMBOLS]
    probes = [*_PROBES, *(f"{symbol}x {symbol}{symbol} y" for symbol in symbols)]
    for text in probes:
        if not _is_equivalent(tokenizer.encode(text, add_special_tokens=False).ids, processor.encode(text), model):
            raise unfaithful
    return tokenizer


def _is_equivalent(ours: list[int], theirs: list[int], model: Any) -> bool:
    """Equal ids, or for Unigram equal scores: ties, as in "......", are broken by rounding, which differs."""
    ours_score, theirs_score = (sum(model.pieces[number].score for number in ids) for ids in (ours, theirs))
    return ours == theirs or (
        model.trainer_spec.model_type == _UNIGRAM and abs(ours_score - theirs_score) < _SCORE_TOLERANCE
    )


def _training_error(message: str, vocab_size: int) -> UserError:
    needs = re.search(rf"\b{vocab_size} vs (\d+)", message)
    if needs:
        return UserError(
            f"data.vocab_size: {vocab_size} is too small for SentencePiece on this data: "
            f"its characters alone take {needs[1]}; set it higher"
        )
    if "sentences_.empty()" in message:
        return UserError("data.sources: there is no text to train a tokenizer on")
    return UserError(f"data.sources: SentencePiece cannot train a tokenizer on this text: {message.splitlines()[0]}")


def _open(model_file: Path) -> Any:
    import sentencepiece

    if not model_file.is_file():
        raise UserError(f"{model_file}: no such file")
    sentencepiece.set_min_log_level(_LOG_ERRORS + 1)  # a wrong file is reported below
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model_file.read_bytes())
        size = processor.get_piece_size()
    except RuntimeError:
        size = 0
    if not size:
        raise UserError(f"{model_file}: not a SentencePiece model")
    return processor


def _parse(model: bytes) -> Any:
    """A ModelProto."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise UserError("a SentencePiece model needs protobuf: pip install 'sojourn[train]'") from None

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    return proto


def _build(model: Any, special_tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    kind, dummy_prefix = model.trainer_spec.model_type, model.normalizer_spec.add_dummy_prefix
    if kind not in (_UNIGRAM, _BPE) or model.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError("the tokenizers package has no such model type")
    tokenizer = Tokenizer(_bpe(model) if kind == _BPE else _unigram(model))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(model))
    if kind == _UNIGRAM:
        tokenizer.pre_tokenizer = _split(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if dummy_prefix else [])])
    for piece in model.pieces:
        special = piece.type == _CONTROL or piece.piece in special_tokens or bool(_SPECIAL_TOKEN.fullmatch(piece.piece))
        if special or piece.type == _USER_DEFINED:  # SentencePiece looks for these after it has replaced spaces
            token = AddedToken(piece.piece, special=special, normalized=piece.type == _USER_DEFINED)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def _bpe(model: Any) -> Any:
    from tokenizers import models

    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.piece for piece in model.pieces if piece.type == _UNKNOWN)
    normal = sorted((p for p in model.pieces if p.type == _NORMAL), key=lambda piece: -piece.score)
    texts = {piece.piece for piece in normal}
    merges: list[tuple[str, str]] = []
    for piece in normal:  # any two pieces that form a piece may merge, the highest score first
        text = piece.piece
        pairs = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in texts and text[i:] in texts]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]])) if len(pairs) > 1 else pairs
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.trainer_spec.byte_fallback)


def _unigram(model: Any) -> Any:
    from tokenizers import models

    unknown = next(number for number, piece in enumerate(model.pieces) if piece.type == _UNKNOWN)
    lowest = min(piece.score for piece in model.pieces if piece.type == _NORMAL)
    scores = [(piece.piece, piece.score if piece.type == _NORMAL else lowest) for piece in model.pieces]
    return models.Unigram(scores, unknown, byte_fallback=model.trainer_spec.byte_fallback)


def _normalizers(model: Any) -> list[Any]:
    from tokenizers import Regex, normalizers

    spec = model.normalizer_spec
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(_prefix(_user_defined(model)))
    return [*steps, normalizers.Replace(" ", _SPACE)]


def _user_defined(model: Any) -> list[str]:
    return [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]


def _prefix(symbols: list[str]) -> Any:
    """A space before the text, but not before a lone symbol: a tokenizer normalizes symbols before it matches them."""
    from tokenizers import Regex, normalizers

    if not symbols:
        return normalizers.Prepend(_SPACE)
    names = "|".join(re.escape(symbol) for symbol in symbols)
    return normalizers.Replace(Regex(rf"\A(?!(?:{names})\z)(?=[\s\S])"), _SPACE)


def _split(model: Any) -> Any:
    """Splits text that spells the name of a reserved piece (<unk>, <0x41>), which Unigram would take for that piece."""
    from tokenizers import Regex, pre_tokenizers

    names = [piece.piece for piece in model.pieces if piece.type in (_UNKNOWN, _BYTE) and len(piece.piece) > 1]
    splits = sorted({f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names})
    return pre_tokenizers.Split(Regex("|".join(splits) or "(?!)"), "merged_with_previous")
