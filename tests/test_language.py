"""The language of a document is detected from its first 1,000 characters."""

from __future__ import annotations

import sys

import pytest

from sojourn.data.clean import language as language_module
from sojourn.data.clean.language import CODES, UNKNOWN, check_language_codes, detect_language
from sojourn.errors import UserError

SENTENCES = {
    "en": "Water boils at a lower temperature on a mountain because the air presses less on its surface.",
    "de": "Wasser kocht auf einem Berg bei niedrigerer Temperatur, weil die Luft dort weniger drückt.",
    "fr": "L'eau bout à une température plus basse en montagne parce que l'air y pèse moins.",
    "es": "El agua hierve a menor temperatura en la montaña porque el aire pesa menos allí.",
    "it": "L'acqua bolle a una temperatura più bassa in montagna, perché l'aria preme di meno.",
    "pt": "A água ferve a uma temperatura mais baixa na montanha porque o ar pesa menos.",
    "nl": "Water kookt op een berg bij een lagere temperatuur omdat de lucht minder drukt.",
    "pl": "Woda wrze w niższej temperaturze w górach, ponieważ powietrze mniej naciska.",
    "tr": "Su, dağda daha düşük sıcaklıkta kaynar çünkü hava daha az basınç yapar.",
    "vi": "Nước sôi ở nhiệt độ thấp hơn trên núi vì không khí ép ít hơn.",
    "id": "Air mendidih pada suhu yang lebih rendah di gunung karena tekanan udara lebih kecil.",
    "ru": "Вода кипит в горах при более низкой температуре, потому что воздух давит слабее.",
    "uk": "Вода кипить у горах за нижчої температури, бо повітря тисне менше.",
    "ar": "يغلي الماء عند درجة حرارة أقل على الجبل لأن الهواء أقل ضغطا.",
    "fa": "آب در کوه در دمای پایین‌تری می‌جوشد چون هوا کمتر فشار می‌آورد.",
    "hi": "पहाड़ पर पानी कम तापमान पर उबलता है क्योंकि हवा का दबाव कम होता है।",
    "zh": "水在山上沸腾的温度比较低，因为那里的空气压力较小。",
    "ja": "山の上では空気の圧力が低いので、水は低い温度で沸騰します。",
    "ko": "산에서는 공기의 압력이 낮아서 물이 더 낮은 온도에서 끓습니다.",
    "el": "Το νερό βράζει σε χαμηλότερη θερμοκρασία στο βουνό.",
    "th": "น้ำเดือดที่อุณหภูมิต่ำกว่าบนภูเขา",
    "he": "מים רותחים בטמפרטורה נמוכה יותר על ההר.",
}


@pytest.mark.parametrize("code", SENTENCES)
def test_a_sentence_is_identified_and_so_is_a_page(code: str) -> None:
    assert detect_language(SENTENCES[code]) == code
    assert detect_language(f"{SENTENCES[code]}\n" * 12) == code


def test_traditional_chinese_is_chinese() -> None:
    assert detect_language("水在山上沸騰的溫度比較低，因為那裡的空氣壓力較小。") == "zh"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("zh", "我们使用 PyTorch 和 transformers 来 fine-tune 模型"),
        ("zh", "把 learning rate 调小一点，然后 resume training。"),
        ("ja", "Pythonでlistをsortする方法"),
        ("ko", "PyTorch로 모델을 fine-tuning 하는 방법"),
        ("ru", "Как установить PyTorch на Windows без ошибок"),
        ("en", "The word 水 means water in Chinese, and the word 山 means mountain; both are used every day."),
    ],
)
def test_words_of_another_language_do_not_change_the_language(code: str, text: str) -> None:
    assert detect_language(text) == code


@pytest.mark.parametrize("text", ["", " \n", "hi", "Paris", "12 + 30 = 42", "…!?", "\ud800", "山", "😀😀😀😀😀"])
def test_too_little_is_not_guessed(text: str) -> None:
    assert detect_language(text) == UNKNOWN


def test_only_the_beginning_is_read() -> None:
    assert detect_language(SENTENCES["de"] * 20 + SENTENCES["zh"] * 500) == "de"


def test_every_language_the_model_knows_can_be_asked_for() -> None:
    assert {label for label in language_module._model().labels if len(label) == 2} <= set(CODES)
    assert set(SENTENCES) <= set(CODES)


@pytest.mark.parametrize(
    ("typed", "meant"), [("eng", "en"), ("zh-CN", "zh"), ("cn", "zh"), ("German", "de"), ("EN", "en")]
)
def test_an_unknown_code_is_refused_with_a_guess(typed: str, meant: str) -> None:
    check_language_codes(["en", "zh"])
    with pytest.raises(
        UserError, match=f"'{typed}' is not a language code; did you mean {meant}. known: af, "
    ) as error:
        check_language_codes(["en", typed])
    assert "\n" not in str(error.value)


def test_a_code_like_no_other_lists_the_known() -> None:
    with pytest.raises(UserError, match="'klingon' is not a language code; known: af, "):
        check_language_codes(["klingon"])


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    language_module._model.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(UserError, match=r"pip install 'sojourn\[clean\]'"):
        detect_language(SENTENCES["de"])
    assert detect_language(SENTENCES["zh"]) == "zh"
