"""The board's page in a real browser, against a real `sojourn board` and real runs."""

from __future__ import annotations

import re
from pathlib import Path

from sojourn.board import app
from sojourn.web.static import ASSETS

PAGE = Path(app.__file__).with_name("page")
FILES = sorted([*PAGE.iterdir(), *ASSETS.iterdir()])


def test_both_languages_have_the_same_texts_and_all_are_used() -> None:
    keys = [re.findall(r"(?<=[ {,])(\w+): \"", (PAGE / name).read_text()) for name in ("en.js", "zh.js")]
    assert keys[0] == keys[1] and len(keys[0]) > 200 and len(set(keys[0])) == len(keys[0])
    values = [re.findall(r"\{(\w+)\}", (PAGE / name).read_text()) for name in ("en.js", "zh.js")]
    assert sorted(values[0]) == sorted(values[1])
    used = "".join(path.read_text() for path in FILES if path.name not in ("en.js", "zh.js"))
    prefixes = set(re.findall(r"t\(`(\w+_)\$\{", used))
    unused = [key for key in keys[0] if not re.search(rf"\b{key}\b", used) and not key.startswith(tuple(prefixes))]
    assert unused == []
    named = set(re.findall(r"\bt\(\"(\w+)\"", used)) | set(re.findall(r"data-(?:text|label)=\"(\w+)\"", used))
    assert named - set(keys[0]) == set()


def test_the_page_has_no_inline_script_and_no_foreign_address() -> None:
    for file in FILES:
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`\\]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not {one for one in addresses if one[8:9].isalnum()}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file
        assert file.suffix != ".html" or not re.search(r"<script(?![^>]* src=)|style=|\son\w+=", text), file
