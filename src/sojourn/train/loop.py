"""Training, from a configuration to `final/`: one loop for every device. A second call on the same run continues it.

The order of things: resolve what the machine decides → the prepared data → the model → the newest good checkpoint, if
any → steps, with saves between them → the final model. A signal or a limit ends the loop after the step in hand.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sojourn.catalog.facts import peak_flops
from sojourn.config.load import read_config, to_yaml
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact, Batch
from sojourn.data.inputs import data_of
from sojourn.data.order import step_rows
from sojourn.data.prepare import prepare
from sojourn.data.show import show_examples
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.run.files import read_json, write_json, write_text
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.train.assess import Assessor
from sojourn.train.build import build_network
from sojourn.train.changes import refuse_harmful_changes
from sojourn.train.checkpoint import check_room
from sojourn.train.environment import describe
from sojourn.train.feed import Ahead, Feed
from sojourn.train.final import write_final
from sojourn.train.guard import Guard
from sojourn.train.meters import Meters, Work
from sojourn.train.optim import Optimizer, learning_rate
from sojourn.train.resolve import resolve
from sojourn.train.saving import Live, Progress, Saver, resume
from sojourn.train.step import Stepper
from sojourn.train.subject import subject_of
from sojourn.train.trackers import refuse_missing_trackers


@dataclass(frozen=True)
class Session:
    """Everything that one call of `train` works with."""

    config: RunConfig
    run: RunFolder
    artefact: Artefact
    stepper: Stepper
    live: Live
    progress: Progress
    total: int
    last_row: int | None
    work: Work

    @property
    def ended(self) -> bool:
        patience = self.config.train.patience
        return self.progress.step >= self.total or (patience is not None and self.progress.worse >= patience)

    def batches(self, step: int) -> list[Batch]:
        """The rows of a global step, in micro batches."""
        rows, train = self.artefact.train, self.config.train
        chosen = step_rows(step, len(rows), train.global_batch, train.seed, self.last_row)
        return list(self.stepper.feed.batches(rows, chosen))


def train(config: RunConfig, run: RunFolder) -> None:
    """Trains `config` in `run` until it is done (returns) or stopped early but resumable (raises Stopped)."""
    began = time.monotonic()
    _refuse_what_is_not_here(config)
    refuse_missing_trackers(config.log.trackers)
    run.acquire()
    try:
        session = _open(config, run)
        if session.ended and run.has_final():
            done = session.progress.step
            print(f"{run.path}: already done ({done} steps); to train longer, begin another run: name=NEW")
        else:
            _run(session, began)
        run.set_status("done", session.progress.step, session.progress.step, resumable=False)
    except BaseException as error:
        status = run.status()
        if status and status.state in ("starting", "running"):
            says = f"{type(error).__name__}: {error}"
            run.set_status("failed", status.step, status.total_steps, says)
            run.event("failed", error=says)
        raise
    finally:
        run.release()


def _refuse_what_is_not_here(config: RunConfig) -> None:
    parallel = config.parallel
    several = isinstance(parallel.gpus, list) and len(parallel.gpus) > 1
    if parallel.engine not in ("auto", "single") or several or parallel.deepspeed is not None:
        raise UserError("parallel: this version trains on one device; use --gpus 0 and leave parallel.engine at auto")


def say(line: str) -> None:
    print(line, flush=True)


def _open(config: RunConfig, run: RunFolder) -> Session:
    """Resolves, prepares, builds, and puts everything back to where the run last was."""
    import torch

    begun = read_config(run.config) if run.exists() else None
    resolved = resolve(config, begun)
    if begun is not None:
        refuse_harmful_changes(begun, resolved.config, run)
    config = resolved.config
    device = _use(config)
    artefact = prepare(data_of(config), prepared_folder(), say, partial(show_examples, say, sys.stdout.isatty()))
    _refuse_other_data(run, artefact)
    if artefact.is_pairs:
        raise UserError(
            "data.sources: preference pairs are prepared, but not trained on yet; to learn the better answers: "
            "data.columns.prompt=prompt data.columns.completion=chosen"
        )
    run.set_status("starting", 0, 0)
    write_text(run.config, to_yaml(config))
    facts = {**describe(device), "auto": resolved.reasons, "data": str(artefact.path.resolve())}
    write_json(run.environment, facts)

    network = build_network(config, artefact, device)
    trained = sum(p.numel() for p in network.model.parameters() if p.requires_grad)
    # Weights and two moments of 32 bits: told now rather than at the first save.
    check_room(run.path, 12 * trained, int(config.save.min_free))
    feed = Feed(
        int(config.train.micro_batch),
        artefact.max_length,
        artefact.pad_id,
        device,
        str(config.train.precision),
        fit=artefact.facts["packing"] == "off",
        backend=network.backend,
        windows=network.windows,
    )
    scaler = torch.amp.GradScaler(device, enabled=config.train.precision == "fp16")
    optimizer = Optimizer(network.model, config.train, device)
    stepper = Stepper(network, optimizer, scaler, feed, config.train.clip, config.train.loss == "whole")
    live = Live(network.model, optimizer, scaler)
    progress = resume(config.save, run, live)
    return Session(
        config, run, artefact, stepper, live, progress, *_length(config, artefact), _work(config, artefact, device)
    )


def _refuse_other_data(run: RunFolder, artefact: Artefact) -> None:
    """The same file with other contents: steps already done would have read other rows, perhaps other tokens."""
    before = Path(str((read_json(run.environment) or {}).get("data", ""))).name
    if before not in ("", artefact.path.name) and any(run.checkpoints.glob("step-*")):
        raise UserError(
            f"{run.path} was begun with other data (the files in data.sources have changed since); put them back to "
            "continue it, or start a new run: name=NEW"
        )


def _use(config: RunConfig) -> str:
    """Makes the chosen device current and returns torch's name for it."""
    import torch

    device = str(config.train.device)
    if device == "cuda" and isinstance(config.parallel.gpus, list):
        number, there = config.parallel.gpus[0], torch.cuda.device_count()
        if number >= there:
            raise UserError(f"parallel.gpus: there is no GPU {number}; this machine has {there}, counted from 0")
        torch.cuda.set_device(number)
    return device


def _work(config: RunConfig, artefact: Artefact, device: str) -> Work:
    """For the meters: what a token costs, and what the card could do. A token attends to its own document only."""
    import numpy as np
    import torch

    lengths = np.diff(artefact.train.documents[:100_000].astype(np.float64))
    attended = float((lengths**2).sum() / max(1.0, lengths.sum())) if len(lengths) else float(artefact.max_length)
    frozen = config.method.kind in ("lora", "qlora")
    flops = subject_of(config).shape.flops_per_token(attended, frozen)
    peak = peak_flops(torch.cuda.get_device_name(), str(config.train.precision)) if device == "cuda" else None
    return Work(flops, peak)


def _length(config: RunConfig, artefact: Artefact) -> tuple[int, int | None]:
    """How many steps, and the row (counted over all epochs) that ends the run."""
    train, rows = config.train, len(artefact.train)
    if train.steps is not None:
        return train.steps, None
    if train.tokens is not None:
        per_step = train.global_batch * max(1.0, float(artefact.train.rows[-1]) / rows)
        return max(1, round(train.tokens / per_step)), None
    last_row = max(1, round((train.epochs or 1.0) * rows))
    return math.ceil(last_row / train.global_batch), last_row


def _run(session: Session, began: float) -> None:
    """From where the run is to its end; the clock of its limits has run since `began`."""
    config, run, total = session.config, session.run, session.total
    live, progress, stepper = session.live, session.progress, session.stepper
    rows, train = len(session.artefact.train), config.train
    parameters = list(live.model.parameters())
    run.event("start", step=progress.step, total_steps=total, device=stepper.feed.device,
              precision=stepper.feed.precision, attention=stepper.network.backend or "its own",
              parameters=sum(p.numel() for p in parameters),
              trained=sum(p.numel() for p in parameters if p.requires_grad))  # fmt: skip
    run.set_status("running", progress.step, total)
    saver = Saver(config, run, live, progress, rows)
    assessor = Assessor(config, run, session.artefact, stepper.network, stepper.feed)
    with (
        Guard(config.limits, before=progress.seconds, began=began) as guard,
        Meters(run, config, total, progress.step, session.work) as meters,
        Ahead(session.batches, total) as ahead,
    ):
        enough = None
        while not session.ended:
            rate = learning_rate(progress.step, total, train)
            live.optimizer.set_learning_rate(rate)
            batches, waited = ahead.take(progress.step)
            loss, norm = stepper.step(batches)
            tokens = sum(batch.real_tokens for batch in batches)
            meters.count(tokens, waited)
            progress.step += 1
            progress.tokens += tokens
            progress.seconds = guard.seconds

            last = progress.step == total
            stop = None if last else guard.should_stop()
            save_now = saver.due() or last or stop is not None
            log_now = progress.step % config.log.every_steps == 0 or progress.step == 1 or last
            if log_now or save_now:  # before a save: a broken model must not replace a good one
                _check_finite(float(loss), float(norm), session, rate)
            if log_now:
                epoch = progress.step * train.global_batch / rows
                meters.log(progress.step, float(loss), rate, float(norm), epoch, guard.spent)
            with meters.paused():
                if assessor.due(progress.step, total) and stop is None:
                    enough = assessor.assess(progress, meters)
                if save_now or enough is not None:
                    saver.save(meters, total, must=last or stop is not None)
            if stop:
                run.set_status("stopped", progress.step, total, stop)
                run.event("stopped", step=progress.step, why=stop)
                raise Stopped(f"stopped by {stop} at step {progress.step} of {total}, saved in {run.path}; "
                              "the same command continues")  # fmt: skip
        if enough is not None:
            meters.say(f"ended early by {enough}")
            run.event("ended_early", step=progress.step, why=enough)
        write_final(live.model, session.artefact, run.final, config)
    run.event("done", step=progress.step, tokens=progress.tokens, seconds=round(progress.seconds, 1))


def _check_finite(loss: float, norm: float, session: Session, rate: float) -> None:
    """An infinite gradient is a skipped step in fp16; elsewhere it has just spoilt the weights."""
    scaled = session.stepper.scaler.is_enabled()
    if math.isfinite(loss) and (scaled or math.isfinite(norm)):
        return
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    try_this = "train.precision=fp32" if scaled else f"a smaller rate: train.lr={rate / 3:.1g}"
    step = session.progress.step
    raise RunFailed(f"step {step}: {what}, so nothing more is saved; try {try_this} name=NEW")
