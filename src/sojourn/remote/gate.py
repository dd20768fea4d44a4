"""The shutdown gate on the laptop: whether a box may be powered off or released without losing a model.

The decision itself is in `box/supervisor.py`, which the box runs too. Here it gets what only the laptop knows: the
platform's disks, from the catalogue, and which copies are at home.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from sojourn.catalog.platforms import platforms
from sojourn.errors import UserError
from sojourn.remote.box.supervisor import Verdict, digest_of, gate, hash_files, place_survives, survival

__all__ = ["Verdict", "digest_of", "gate", "hash_files", "place_survives", "survival"]

Action = Literal["power_off", "release"]
Item = dict[str, Any]


def disks_of(platform: str) -> list[dict[str, Any]]:
    """What each disk of a platform survives, as spec.json has it; none for an unknown platform."""
    facts = next((facts for facts in platforms() if facts.name == platform), None)
    return [
        {"path": disk.path, "survives": disk.survives, "kept_hours": disk.kept_hours}
        for disk in (facts.disks if facts else ())
    ]


def items_of(report: dict[str, Any]) -> list[Item] | None:
    """The checkpoints and models of a run from the box's verified.json or from its answer to `gate`; None where it has
    none."""
    items = report.get("items")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else None


def copies_at_home(items: Iterable[Item], folder: Path) -> dict[str, str]:
    """Name → digest of every item of which `folder` has a byte-identical copy: each byte here is read."""
    found = {}
    for item in items:
        copy = folder / str(item.get("name"))
        if copy.is_dir() and digest_of(hash_files(copy)) == item.get("digest"):
            found[str(item["name"])] = str(item["digest"])
    return found


def pulled_record(copies: dict[str, str]) -> bytes:
    """JOBDIR/pulled, which says to the box what is safe at home."""
    return (json.dumps({"verified": copies}) + "\n").encode()


def with_home_copies(items: Iterable[Item], copies: dict[str, str]) -> list[Item]:
    home = {"kind": "home", "path": "", "verified": True}
    return [
        {**item, "places": [*item.get("places", []), home]}
        if item.get("digest") and copies.get(str(item.get("name"))) == item["digest"]
        else item
        for item in items
    ]


def decide(platform: str, action: Action, items: list[Item] | None, run: str, copies: dict[str, str]) -> Verdict:
    """For a box whose items are known here; `None`: they are not, and nothing may go."""
    known = None if items is None else with_home_copies(items, copies)
    return gate(platform, action, disks_of(platform), known, run)


def require(verdict: Verdict, action: Action) -> None:
    if not verdict.allowed:
        what = "released" if action == "release" else "powered off"
        raise UserError(f"the box is not {what}: {verdict.reason}")
