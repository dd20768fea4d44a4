"""`sojourn plan --share`: what was measured on this machine's cards, to be sent to us, as rows of the catalogue."""

from __future__ import annotations

from sojourn.catalog.gpus import SUSTAINED, Gpu, gpus
from sojourn.catalog.tables import user_file
from sojourn.catalog.user_rows import row_text
from sojourn.estimate.uncertainty import MEASURED
from sojourn.plan.calibration import correction


def measured_here() -> list[Gpu]:
    """Cards whose rates are in the user's own catalogue."""
    return [card for card in gpus() if card.rates == MEASURED and card.source == str(user_file())]


def share_lines() -> list[str]:
    """Rows with what was measured, and how far runs here were from their plans; no path, no name of a run or a user."""
    cards, learned = measured_here(), correction()
    if not cards:
        return ["no card was measured here yet; on its machine, type: sojourn doctor --measure"]
    lines = ["# Measured by `sojourn doctor --measure`. To send it: an issue of the project, or a change of gpus.toml."]
    for card in cards:
        known = {key: value for key in SUSTAINED if (value := getattr(card, key)) is not None}
        lines += ["", *row_text("gpu", card.name, {**known, "rates_source": card.rates_source}).rstrip().splitlines()]
        if card.name in learned.times:
            lines.append(f"# runs here ({learned.records}): steps took {learned.times[card.name]:.3f} times the plan's")
    return lines
