"""Everybody can read and use every page: contrast in both themes, names, headings, the keyboard, the language."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from board.page_audit import keyboard, low_contrast, unnamed, wrong_headings
from board_page import CURVES, in_browser, press, show
from webdriver import Browser

pytestmark = in_browser
READY = "!document.querySelector('.plan-result .empty') && !document.querySelector('.plan-card .empty')"
PAGES = {
    "runs": ("#/runs", "document.querySelector('.run-name')"),
    "run": ("#/run/other", CURVES),
    "new": ("#/new", "document.querySelector('.segments')"),
    "plan": ("#/plan", "document.querySelector('.offers tbody tr')"),
    "data": ("#/data", "document.querySelector('.data-table a')"),
    "compare": ("#/compare/other,tiny", "document.querySelector('.compared code')"),
}
TABS = {
    "samples": ".sample", "checkpoints": ".checkpoints", "config": ".config", "events": ".events-table",
    "logs": ".logs, .empty", "environment": ".sections",
}  # fmt: skip


def problems(page: Browser) -> dict[str, list[str]]:
    time.sleep(0.4)  # further answers
    found = {"contrast": low_contrast(page), "names": unnamed(page), "headings": wrong_headings(page)}
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.fixture(params=["light-en", "dark-zh"])
def styled(page: Browser, request: pytest.FixtureRequest) -> Browser:
    theme, language = request.param.split("-")
    page.dark(theme == "dark")
    page.js("localStorage.setItem('sojourn.language', arguments[0])", language)
    return page


@pytest.mark.parametrize("width", [1300, 390])
def test_every_page_can_be_read_and_has_names_and_headings(styled: Browser, board: str, width: int) -> None:
    styled.size(width, 900)
    wrong = {}
    for name, (address, ready) in PAGES.items():
        show(styled, board, address, ready)
        styled.wait(READY)
        if found := problems(styled):
            wrong[name] = found
        language = styled.js("return localStorage.getItem('sojourn.language')")
        assert styled.js("return document.documentElement.lang") == {"en": "en", "zh": "zh-CN"}[language]
    show(styled, board, "#/data", "document.querySelector('.data-table a')")
    styled.click(".data-table a")
    styled.wait("document.querySelector('.example mark') && document.querySelector('.duplicates article')")
    wrong |= {"artefact": found} if (found := problems(styled)) else {}
    show(styled, board, "#/run/tiny", CURVES)
    for tab, ready in TABS.items():
        styled.js("document.getElementById(arguments[0]).click()", f"tab-{tab}")
        styled.wait("document.querySelector(arguments[0])", ready)
        wrong |= {tab: found} if (found := problems(styled)) else {}
    assert wrong == {}, json.dumps(wrong, indent=1, ensure_ascii=False)


def test_menus_dialogs_tasks_and_empty_pages_can_be_read(styled: Browser, board: str) -> None:
    wrong = {}
    show(styled, board, "#/runs", "document.querySelector('.run-name')")
    styled.js("document.querySelector('.menu button').click()")
    wrong["menu"] = problems(styled)
    styled.js("document.querySelector('.menu-list:popover-open button:last-child').click()")
    styled.wait("document.querySelector('dialog[open]')")
    wrong["dialog"] = {**problems(styled), "keyboard": keyboard(styled)}
    styled.js("document.querySelector('dialog').close(); document.getElementById('tasks-open').click()")
    wrong["tasks"] = problems(styled)
    styled.js("document.querySelector('#tasks button').click()")
    styled.js(
        "const one = document.querySelector('[type=search]'); one.value = 'zzz'; one.dispatchEvent(new Event('input'))"
    )
    wrong["nothing found"] = problems(styled)
    for address in ("#/compare/", "#/run/nothing", "#/data/nothing"):
        show(styled, board, address, "document.querySelector('.page')")
        wrong[address] = problems(styled)
    styled.log()  # the 404
    wrong = {name: one for name, one in wrong.items() if any(one.values())}
    assert wrong == {}, json.dumps(wrong, indent=1, ensure_ascii=False)


@pytest.mark.parametrize("name", list(PAGES))
def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(page: Browser, board: str, name: str) -> None:
    address, ready = PAGES[name]
    show(page, board, address, ready)
    page.wait(READY)
    time.sleep(0.5)
    assert keyboard(page) == []


def test_a_page_has_one_main_part_and_a_link_to_it(page: Browser, board: str, shared_home: Path) -> None:
    show(page, board, "#/runs", "document.querySelector('.run-name')")
    page.js("document.activeElement?.blur()")
    page.keys("\ue004", "\ue007")
    assert page.js("return document.activeElement.id") == "main" and page.count("main") == 1
    press(page, "中文", "#side")
    page.wait("document.documentElement.lang === 'zh-CN'")


def test_the_audit_finds_what_is_wrong(page: Browser, board: str) -> None:
    show(page, board, "#/data", "document.querySelector('.page-head')")
    page.js("""
      const place = document.querySelector(".page");
      const make = (tag) => document.createElement(tag);
      const add = (tag, text, more) => place.append(Object.assign(make(tag), { textContent: text, ...more }));
      add("h4", "x");
      add("p", "grey", { id: "grey" });
      document.getElementById("grey").style.color = "#999";
      add("button", "", { id: "none" });
      document.getElementById("none").style.outline = "none";
      add("a", "first", { href: "#/x", tabIndex: 5 });
    """)
    assert any("grey" in one for one in low_contrast(page)) and wrong_headings(page) and unnamed(page)
    assert {one.split(":")[0] for one in keyboard(page)} >= {"focus is not visible", "not in the order of the page"}
