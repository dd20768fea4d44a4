"""What a page must have for everybody: contrast, names, headings, and a keyboard that reaches everything and shows
where it is. Each function answers what is wrong."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from webdriver import Browser

TAB = "\ue004"
_SCRIPT = Path(__file__).with_suffix(".js").read_text()
_NAMED = frozenset((
    "button", "link", "textbox", "searchbox", "combobox", "checkbox", "slider", "tab", "menuitem", "img", "dialog",
    "progressbar", "spinbutton", "radio", "switch", "navigation", "DisclosureTriangle", "PopUpButton",
))  # fmt: skip


def _ask(page: Browser, call: str) -> Any:
    return page.js(f"{_SCRIPT}\nreturn {call}")


def low_contrast(page: Browser) -> list[str]:
    """Texts below 4.5 : 1, or 3 : 1 where they are large (WCAG 2.2, 1.4.3)."""
    return list(_ask(page, "lowContrast()"))


def wrong_headings(page: Browser) -> list[str]:
    return list(_ask(page, "wrongHeadings()"))


def unnamed(page: Browser) -> list[str]:
    """Controls and pictures without a name, as the browser tells a screen reader."""
    nodes: list[dict[str, Any]] = page.cdp("Accessibility.getFullAXTree")["nodes"]
    return [
        f"{node['role']['value']} {node.get('description', {}).get('value', '')}"
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in _NAMED
        and not node.get("name", {}).get("value", "").strip()
    ]


def keyboard(page: Browser) -> list[str]:
    """Tab goes to every control once, in the order of the page, and one sees where it is."""
    count = int(_ask(page, "findTabbable()"))
    wrong, reached = [], []
    for _ in range(count + 1):  # once around: the browser's own controls are between the last and the first
        page.keys(TAB)
        place, shown, html = _ask(page, "focus()")
        if place >= 0:
            reached.append(place)
            wrong += [] if shown else [f"focus is not visible: {html}"]
    missing = sorted(set(range(count)) - set(reached))
    wrong += [str(page.js("return window.tabbable[arguments[0]].outerHTML.slice(0, 160)", one)) for one in missing]
    first = reached.index(min(reached)) if page.count("dialog[open]") else 0  # a dialog starts at its first field
    around = reached[first:] + reached[:first]
    in_order = all(one < other or other == around[0] for one, other in pairwise(around))
    return wrong + ([] if in_order else [f"not in the order of the page: {reached}"])
