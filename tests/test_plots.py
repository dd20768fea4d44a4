"""The plot of a data report is well-formed, in proportion, and complete whatever is missing."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from sojourn.plot.data_report import histogram_text, report_svg

SVG = "{http://www.w3.org/2000/svg}"
FACTS: dict[str, Any] = {
    "lengths": [
        {"from": 1, "to": 16, "documents": 12},
        {"from": 17, "to": 32, "documents": 48},
        {"from": 33, "to": 64, "documents": 0},
        {"from": 65, "to": 128, "documents": 3},
    ],
    "max_length": 64,
    "languages": {"en": 0.7, "zh": 0.3},
    "fill": 0.987,
    "documents": 1000,
    "tokens": 200_000,
    "trained_tokens": 150_000,
    "truncated": 3,
    "duplicates": 2,
    "title": "stories",
}


def drawn(facts: dict[str, Any]) -> ET.Element:
    return ET.fromstring(report_svg(facts))  # noqa: S314


def texts(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def bars(picture: ET.Element) -> list[ET.Element]:
    """Those of the histogram: the only ones with a count."""
    return [rect for rect in picture.iter(f"{SVG}rect") if "tokens:" in (rect.findtext(f"{SVG}title") or "")]


def number(element: ET.Element, name: str) -> float:
    return float(element.attrib[name])


def test_bars_are_in_proportion_to_their_counts() -> None:
    heights = [number(bar, "height") for bar in bars(drawn(FACTS))]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.05)
    assert heights[1] == pytest.approx(16 * heights[3], abs=0.2)
    assert heights[2] == 0


def test_bars_beyond_max_length_look_different_and_the_mark_stands_before_them() -> None:
    picture = drawn(FACTS)
    assert [bar.attrib["class"] for bar in bars(picture)] == ["bar", "bar", "bar", "long"]
    mark = next(line for line in picture.iter(f"{SVG}line") if line.attrib["class"] == "mark")
    shorter, longer = bars(picture)[2:]
    assert number(shorter, "x") + number(shorter, "width") <= number(mark, "x1") <= number(longer, "x")


def test_languages_share_the_whole_width() -> None:
    shares = [rect for rect in drawn(FACTS).iter(f"{SVG}rect") if rect.attrib.get("class") == "share"]
    wide, narrow = (number(rect, "width") for rect in shares)
    assert wide / narrow == pytest.approx(7 / 3, rel=1e-3)
    assert number(shares[1], "x") == pytest.approx(wide)


def test_many_languages_end_with_the_others() -> None:
    told = texts(drawn({"languages": {f"l{place}": 1 / (place + 1) for place in range(12)}}))
    assert len([words for words in told if "%" in words]) == 9
    assert any(words.startswith("others") for words in told)


def test_numbers_have_separators_and_an_unknown_language_is_named_so() -> None:
    told = texts(drawn(FACTS | {"tokens": 98_765_432_109, "languages": {"?": 1.0}}))
    assert {"1,000", "98.77 billion", "150,000", "98.7%", "unknown 100.0%"} <= set(told)


@pytest.mark.parametrize(
    "title", ["a <b> & \"c\" 'd' ]]>", "</text><script>alert(1)</script>", "tab\tand\x00bell\x07", "中文"]
)
def test_text_is_escaped(title: str) -> None:
    picture = drawn(FACTS | {"title": title, "languages": {title: 1.0}})
    clean = "".join(character if character.isprintable() else " " for character in title)
    assert clean in texts(picture)
    assert not list(picture.iter(f"{SVG}script"))


@pytest.mark.parametrize(
    "missing", [*itertools.combinations(FACTS, 1), *itertools.combinations(FACTS, 2), tuple(FACTS)]
)
def test_any_key_may_be_missing_or_empty(missing: tuple[str, ...]) -> None:
    rest = {key: value for key, value in FACTS.items() if key not in missing}
    assert drawn(rest).tag == f"{SVG}svg"
    empty = {key: type(FACTS[key])() if key in ("lengths", "languages", "title") else None for key in missing}
    assert report_svg(rest | empty) == report_svg(rest)


@pytest.mark.parametrize("count", range(1, 41))
def test_nothing_leaves_the_picture_and_no_two_labels_meet(count: int) -> None:
    bins = [{"from": 2**place + 1, "to": 2 ** (place + 1), "documents": place * 1234} for place in range(count)]
    picture = drawn({"lengths": bins, "max_length": 2 ** (count // 2), "title": "long " * 40})
    width = number(picture, "width")
    found = bars(picture)
    assert len(found) == count
    assert all(number(bar, "width") > 0 for bar in found)
    assert all(number(bar, "x") >= 0 and number(bar, "x") + number(bar, "width") <= width for bar in found)
    labels = [text for text in picture.iter(f"{SVG}text") if text.attrib.get("text-anchor") == "middle"]
    ends = [(number(text, "x"), len(text.text or "") * 3.6) for text in labels]
    assert all(a + half < b - other for (a, half), (b, other) in itertools.pairwise(ends))


@pytest.mark.parametrize("documents", [0, 1, 3, 7, 99, 101, 12_345, 10**9])
def test_the_tallest_bar_fits(documents: int) -> None:
    (bar,) = bars(drawn({"lengths": [{"from": 1, "to": 8, "documents": documents}]}))
    assert number(bar, "y") >= 39.99
    if documents:
        assert number(bar, "height") > 190 / 2


def test_the_terminal_gets_the_same_histogram() -> None:
    assert histogram_text(FACTS["lengths"], width=8) == [
        "  1–16  ██        12",
        " 17–32  ████████  48",
        " 33–64             0",
        "65–128  ▌          3",
    ]
    assert histogram_text([]) == []
    assert histogram_text([{"from": 5, "to": 5, "documents": 0}], width=4) == ["5        0"]


def test_a_single_document_among_many_still_shows() -> None:
    first, second = histogram_text([{"from": 1, "to": 2, "documents": 1}, {"from": 3, "to": 4, "documents": 10**6}])
    assert "▏" in first
    assert second.count("█") == 40
