"""Records planned and measured memory and step time of rehearsals and finished runs on a GPU, for later plans."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sojourn.estimate.step_time import step_time
from sojourn.estimate.uncertainty import MEASURED
from sojourn.estimate.workload import Workload
from sojourn.machine.gpus import torch_gpus
from sojourn.machine.measure import Size, measure, write_row
from sojourn.plan.calibration import note
from sojourn.resolve.cuda_graphs import with_cuda_graphs
from sojourn.resolve.resolved import with_value
from sojourn.resolve.workload import workload_of
from sojourn.storage.files import read_json_lines
from sojourn.train.local_device import local_device, local_gpu
from sojourn.train.model_spec import local_model_spec
from sojourn.train.session import Session, print_line


def workload_of_session(session: Session) -> Workload:
    """The workload of a running session, with its own document length."""
    stepper = session.stepper
    config = with_value(session.config, "train", "micro_batch", stepper.batcher.micro_batch)
    model = local_model_spec(config)
    device = local_device(config, model, stepper.ranks.world_size)
    workload = with_cuda_graphs(config, workload_of(config, model, device), device)
    facts: dict[str, Any] = session.artefact.report.get("train", {})
    packed = session.artefact.facts.get("packing") == "packed" and facts.get("documents")
    document = max(1, round(facts["tokens"] / facts["documents"])) if packed else None
    return replace(
        workload, document_length=None if document is None or document >= workload.sequence_length else document
    )


def record_rehearsal(session: Session, step_seconds: float, memory: int | None) -> None:
    if session.stepper.batcher.device == "cuda" and memory is not None:
        with _ignoring_errors():
            _record(session, "rehearsal", memory, step_seconds)


def measure_unknown_card(home: Path) -> str | None:
    """What this GPU sustains, into the user's catalogue, unless it is known: by `doctor --measure`, by an earlier
    rehearsal, or to us. The line that says so."""
    card, said = local_gpu(), list[str]()
    if card is not None and card.rates == MEASURED:
        return None
    with _ignoring_errors():
        cards = torch_gpus()
        found = measure(home, cards, Size(seconds=3.0))
        _, name = write_row(found, cards[0])
        said.append(f"{name} measured for later plans: {found.values['matmul_tflops']:g} TFLOP/s of matmuls")
    return said[0] if said else None


def record_run(session: Session) -> None:
    if session.stepper.batcher.device == "cuda" and session.stepper.ranks.is_main:
        with _ignoring_errors():
            _record_run(session)


@contextmanager
def _ignoring_errors() -> Iterator[None]:
    """Calibration that cannot be written must not fail a run."""
    try:
        yield
    except Exception as error:
        print_line(f"note: no calibration was recorded for later plans: {type(error).__name__}: {error}")


def _record_run(session: Session) -> None:
    """The median of all logged speeds and the highest memory."""
    lines = read_json_lines(session.run.metrics)
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    peaks = [line["memory"] for line in lines if line.get("memory")]
    if speeds and peaks:
        config = session.config
        tokens = config.train.global_batch * config.data.max_length
        _record(session, "run", max(peaks), tokens / statistics.median(speeds))


def _record(session: Session, kind: str, memory: int, step_seconds: float) -> None:
    import torch

    workload, card = workload_of_session(session), local_gpu()
    name = torch.cuda.get_device_name() if card is None else card.name
    planned = None if card is None else step_time(workload, card).step_seconds
    note(workload, name, kind, {"memory": memory, "step_seconds": step_seconds}, planned)
