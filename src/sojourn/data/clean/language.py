"""Language identification, fast enough for every document.

The script decides where it can (Chinese, Japanese, Korean, Greek, Thai, …), a count of function words decides for plain
English, and py3langid, which ships its model, for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sojourn.config.messages import ask_if_meant, did_you_mean, normalize, printable
from sojourn.errors import UserError

if TYPE_CHECKING:
    import numpy as np

UNKNOWN = "?"
MAX_CHARACTERS = 1000
_CLASSIFIED_CHARACTERS = 160

_LIST = """
af am an ar as az ba be bg bn br bs ca cs cy da de dz el en eo es et eu fa fi fo fr fy ga gd gl gu ha he hi hr
ht hu hy id ig is it ja jv ka kk km kn ko ku ky la lb lg ln lo lt lv mg mk ml mn mr ms mt my ne nl nn no oc om
or pa pl ps pt qu ro ru rw sa se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz vi vo wa xh
yo zh zu
"""
CODES = tuple(_LIST.split())

# Letters by script: a language code, or a name in capitals where several languages share the script.
_SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "LATIN": ((0x41, 0x5B), (0x61, 0x7B), (0xC0, 0x250), (0x1E00, 0x1F00), (0xFF21, 0xFF3B), (0xFF41, 0xFF5B)),
    "HAN": ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x20001)),
    "KANA": ((0x3041, 0x3097), (0x30A1, 0x30FB), (0x31F0, 0x3200), (0xFF66, 0xFF9E)),
    "HANGUL": ((0x1100, 0x1200), (0x3131, 0x318F), (0xAC00, 0xD7A4)),
    "CYRILLIC": ((0x400, 0x530),),
    "ARABIC": ((0x620, 0x6E0), (0x6EE, 0x700), (0x750, 0x780), (0xFB50, 0xFE00), (0xFE70, 0xFEFF)),
    "DEVANAGARI": ((0x904, 0x964), (0x971, 0x980)),
    "BENGALI": ((0x980, 0xA00),),
    "TIBETAN": ((0xF40, 0xF6D),),
    "el": ((0x370, 0x400), (0x1F00, 0x2000)),
    "hy": ((0x531, 0x590),),
    "he": ((0x5D0, 0x5EB),),
    "pa": ((0xA00, 0xA80),),
    "gu": ((0xA80, 0xB00),),
    "or": ((0xB00, 0xB80),),
    "ta": ((0xB80, 0xC00),),
    "te": ((0xC00, 0xC80),),
    "kn": ((0xC80, 0xD00),),
    "ml": ((0xD00, 0xD80),),
    "si": ((0xD80, 0xE00),),
    "th": ((0xE00, 0xE80),),
    "lo": ((0xE80, 0xF00),),
    "my": ((0x1000, 0x10A0),),
    "ka": ((0x10A0, 0x1100), (0x1C90, 0x1CC0)),
    "am": ((0x1200, 0x1380),),
    "km": ((0x1780, 0x1800),),
}
_NAMES = ("", *_SCRIPTS)
_LATIN, _HAN, _KANA, _HANGUL = range(1, 5)

# A Han character or a syllable counts as four letters: Chinese with English words in it is still Chinese.
_WIDE_WEIGHT = 4
_MIN_LETTERS = 8
_MIN_CONFIDENCE = 0.2

_ENGLISH = frozenset(("the", "of", "and", "to", "that", "with", "which"))
_MIN_ENGLISH_SHARE = 0.1
_MIN_ENGLISH_WORDS = 20

# For model labels without a two-letter code.
_TO_TWO_LETTERS = {
    "yue": "zh",
    "wuu": "zh",
    "pcm": "en",
    "arz": "ar",
    "ary": "ar",
    "uzs": "uz",
    "ltg": "lv",
    "grc": "el",
}

_SPELLINGS = {
    spelling: code
    for code, spellings in {
        "ar": "arabic ara",
        "de": "german deutsch ger",
        "en": "english us gb",
        "es": "spanish spa",
        "fr": "french",
        "hi": "hindi",
        "it": "italian",
        "ja": "japanese jp jpn",
        "ko": "korean kr",
        "pt": "portuguese",
        "ru": "russian",
        "zh": "chinese cn chi cmn mandarin tw",
    }.items()
    for spelling in spellings.split()
}


def detect_language(text: str) -> str:
    """The ISO 639-1 code, from the first 1,000 characters; `?` if unknown."""
    text = text[:MAX_CHARACTERS]
    if text.isascii():
        return _if_english(text) or _classify(text)
    letters = _count_letters(text)
    wide = letters[_HAN : _HANGUL + 1]
    narrow = letters.copy()
    narrow[_HAN : _HANGUL + 1] = 0
    most = int(narrow.argmax())
    if int(wide.sum()) * _WIDE_WEIGHT > int(narrow[most]):
        return _east_asian(*wide.tolist()) if int(wide.sum()) * _WIDE_WEIGHT >= _MIN_LETTERS else UNKNOWN
    if narrow[most] < _MIN_LETTERS // 2:
        return UNKNOWN
    if _NAMES[most].islower():
        return _NAMES[most]
    return (_if_english(text) if most == _LATIN else "") or _classify(text)


def detect_language_or_unknown(text: str) -> str:
    """`?` where py3langid is needed and not installed: a report can do without it."""
    try:
        return detect_language(text)
    except UserError:
        return UNKNOWN


def check_language_codes(codes: Sequence[str]) -> None:
    """Raises for an unknown code."""
    for code in codes:
        if code not in CODES:
            hint = _suggestion(code) or ";"
            known = ", ".join(CODES)
            raise UserError(f"data.clean.languages: {printable(code)!r} is not a language code{hint} known: {known}")


def _suggestion(code: str) -> str:
    """For a country (`cn`), a name (`german`), a longer code (`eng`, `zh-CN`) or a typo."""
    spelling = normalize(code)
    language = _SPELLINGS.get(spelling)
    if language is None and (len(spelling) <= 3 or spelling[2] == "_") and spelling[:2] in CODES:
        language = spelling[:2]
    return ask_if_meant(language) if language else did_you_mean(code, CODES)


def _count_letters(text: str) -> np.ndarray:
    """How many letters of each script."""
    import numpy as np

    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    counts = np.bincount(_script_table()[np.minimum(codes, 0x20000)], minlength=len(_NAMES))
    counts[0] = 0
    return counts


@lru_cache(maxsize=1)
def _script_table() -> np.ndarray:
    import numpy as np

    table = np.zeros(0x20001, dtype=np.uint8)
    for number, ranges in enumerate(_SCRIPTS.values(), start=1):
        for first, stop in ranges:
            table[first:stop] = number
    return table


def _east_asian(han: int, kana: int, hangul: int) -> str:
    """Korean may quote Chinese characters; Japanese always has kana."""
    if hangul >= han + kana:
        return "ko"
    return "ja" if kana * 8 > han + kana else "zh"


def _if_english(text: str) -> str:
    """`en` if English function words are as frequent as in plain prose; no other language reaches that."""
    words = text.lower().split()
    if len(words) < _MIN_ENGLISH_WORDS:
        return ""
    return "en" if sum(map(_ENGLISH.__contains__, words)) >= _MIN_ENGLISH_SHARE * len(words) else ""


def _classify(text: str) -> str:
    part = _middle(text)
    if sum(map(str.isalpha, part)) < _MIN_LETTERS:
        return UNKNOWN
    code, confidence = _model().classify(part)
    if confidence < _MIN_CONFIDENCE:
        return UNKNOWN
    code = _TO_TWO_LETTERS.get(code, code)
    return code if code in CODES else UNKNOWN


def _middle(text: str) -> str:
    """A part long enough to classify, away from a heading."""
    spare = len(text) - _CLASSIFIED_CHARACTERS
    return text if spare <= 0 else text[spare // 2 : spare // 2 + _CLASSIFIED_CHARACTERS]


@lru_cache(maxsize=1)
def _model() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError("language identification needs py3langid: pip install 'sojourn[clean]'") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
