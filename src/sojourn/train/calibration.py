"""Planned against measured: what a rehearsal or a finished run on a GPU leaves for later plans."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sojourn.estimate.step_time import speed
from sojourn.estimate.workload import Work
from sojourn.plan.calibration import note
from sojourn.storage.files import read_json_lines
from sojourn.train.resolve import card_here, work_here
from sojourn.train.session import Session, say
from sojourn.train.subject import subject_of


def work_of_session(session: Session) -> Work:
    """As plans see it, with the documents as long as they really are."""
    config, stepper = session.config, session.stepper
    work = work_here(config, subject_of(config), stepper.batcher.micro_batch, None, stepper.ranks.world_size)
    facts: dict[str, Any] = session.artefact.report.get("train", {})
    packed = session.artefact.facts.get("packing") == "packed" and facts.get("documents")
    document = max(1, round(facts["tokens"] / facts["documents"])) if packed else None
    return replace(work, document=None if document is None or document >= work.length else document)


def note_rehearsal(session: Session, step_seconds: float, memory: int | None) -> None:
    if session.stepper.batcher.device == "cuda" and memory is not None:
        with _harmless():
            _note(session, "rehearsal", memory, step_seconds)


def note_run(session: Session) -> None:
    if session.stepper.batcher.device == "cuda" and session.stepper.ranks.is_main:
        with _harmless():
            _note_run(session)


@contextmanager
def _harmless() -> Iterator[None]:
    """No lesson is worth a run that has ended well."""
    try:
        yield
    except Exception as error:
        say(f"note: nothing was noted for later plans: {type(error).__name__}: {error}")


def _note_run(session: Session) -> None:
    """The median of all logged speeds and the highest memory."""
    lines = read_json_lines(session.run.metrics)
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    peaks = [line["memory"] for line in lines if line.get("memory")]
    if speeds and peaks:
        config = session.config
        tokens = config.train.global_batch * config.data.max_length
        _note(session, "run", max(peaks), tokens / statistics.median(speeds))


def _note(session: Session, kind: str, memory: int, step_seconds: float) -> None:
    import torch

    work, card = work_of_session(session), card_here()
    name = torch.cuda.get_device_name() if card is None else card.name
    planned = None if card is None else speed(work, card).step_seconds
    note(work, name, kind, {"memory": memory, "step_seconds": step_seconds}, planned)
