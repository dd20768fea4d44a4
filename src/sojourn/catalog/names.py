"""Finds a GPU by whatever people and drivers call it: "4090", "rtx 4090", "NVIDIA A100-SXM4-80GB"; and its prices."""

import difflib
import re
from dataclasses import replace
from pathlib import Path

from sojourn.catalog.facts import Gpu, Price, gpus, prices
from sojourn.catalog.tables import user_file
from sojourn.config.words import shown
from sojourn.errors import UserError

_NOISE = re.compile(r"^(nvidia|geforce|tesla|quadro|apple|gpu|graphics|card|rtx|hbm\d?e?|sxm\d?)$")
_MEMORY = re.compile(r"^(\d+)(gb|gib|g)$")


def _parts(name: str) -> tuple[str, float | None, bool]:
    """The model as one word, the memory if the name tells it, and whether it says PCIe."""
    model, memory, pcie = [], None, False
    for word in re.split(r"[\s\-_/()]+", name.lower().replace("rtx", "rtx ")):
        if found := _MEMORY.match(word):
            memory = float(found[1])
        elif word == "pcie":
            pcie = True
        elif word and not _NOISE.match(word):
            model.append(word)
    if len(model) > 1 and re.fullmatch(r"\d{1,4}", model[-1]) and memory is None:  # "a100 80", "4060 Ti 16"
        memory = float(model.pop())
    return "".join(model), memory, pcie


def gpu(name: str, memory_gib: float | None = None, user: Path | None = None) -> Gpu:
    """The catalogue's row for a GPU; `memory_gib`, as the driver reports it, settles names sold in two sizes.

    Apple rows name the largest configuration; a smaller one is the same chip with its own memory.
    """
    catalogue = gpus(user)
    model, said_gib, pcie = _parts(name)
    same = [row for row in catalogue if _parts(row.name)[0] == model]
    if not same:
        raise UserError(_unknown(name, model, catalogue))
    form = [row for row in same if _parts(row.name)[2] == pcie] or same
    if said_gib is not None:
        form = [row for row in form if _is_sold_as(said_gib, row)]
    if memory_gib is not None:
        form = [row for row in form if row.unified or 0.85 <= memory_gib / row.memory_gib <= 1.05]
    if len(form) > 1 and said_gib is memory_gib is None:  # without a size, the row that names none is meant
        form = [row for row in form if _parts(row.name)[1] is None] or form
    if len(form) == 1:
        row, given = form[0], said_gib or memory_gib
        return replace(row, memory_gib=min(given, row.memory_gib)) if given and row.unified else row
    if form:
        sizes = " or ".join(f"'{row.name}'" for row in form)
        raise UserError(f"'{shown(name)}' is made in more than one size: say {sizes}")
    sizes = ", ".join(f"'{row.name}' ({row.memory_gib:g} GiB)" for row in same)
    raise UserError(
        f"the catalogue has no '{shown(name)}' of that memory size, only {sizes}; add yours to {user_file()}"
    )


def _is_sold_as(said_gib: float, row: Gpu) -> bool:
    """B200 is called 180, 186 and 192 GB; no card is sold in two sizes that near to each other."""
    if row.unified:
        return said_gib <= row.memory_gib
    return abs(row.memory_gib - said_gib) <= max(1.0, row.memory_gib / 15)


def _unknown(name: str, model: str, catalogue: tuple[Gpu, ...]) -> str:
    known = {_parts(row.name)[0]: row.name for row in catalogue}
    close = difflib.get_close_matches(model[:60], known, n=3, cutoff=0.5)
    guess = (
        f"did you mean {' or '.join(known[c] for c in close)}?"
        if close
        else "it knows cards like RTX 4090 or A100 80GB."
    )
    return f"no GPU called '{shown(name)}' in the catalogue; {guess} Your own cards go into {user_file()}"


def prices_of(card: Gpu, user: Path | None = None) -> tuple[Price, ...]:
    """A card's prices. Where a platform has none for this board, those of the same card on another (PCIe, SXM)."""
    everything = prices(user)
    own = [price for price in everything if price.gpu == card.name]
    model, size = _parts(card.name)[:2]
    sisters = {row.name for row in gpus(user) if _parts(row.name)[:2] == (model, size)}
    served = {price.platform for price in own}
    return (*own, *(p for p in everything if p.gpu in sisters and p.platform not in served))
