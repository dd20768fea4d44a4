"""Training, from a configuration to `final/`: one loop for every device. A second call on the same run continues it.

The order of things: resolve what the machine decides → the prepared data → the model → the newest good checkpoint, if
any → steps, with saves between them → the final model. A signal or a limit ends the loop after the step in hand.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial

from sojourn.config.load import read_config, to_yaml
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.data.inputs import data_of
from sojourn.data.order import step_rows
from sojourn.data.prepare import prepare
from sojourn.data.show import show_examples
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.model.scratch import build_model
from sojourn.run.files import write_json, write_text
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.train.changes import refuse_harmful_changes
from sojourn.train.checkpoint import check_room
from sojourn.train.environment import describe
from sojourn.train.final import write_final
from sojourn.train.guard import Guard
from sojourn.train.meters import Meters
from sojourn.train.optim import Optimizer, learning_rate
from sojourn.train.resolve import resolve
from sojourn.train.saving import Live, Progress, Saver, resume
from sojourn.train.step import Feed, evaluate, global_step


@dataclass(frozen=True)
class Session:
    """Everything that one call of `train` works with."""

    config: RunConfig
    run: RunFolder
    artefact: Artefact
    feed: Feed
    live: Live
    progress: Progress
    total: int
    last_row: int | None


def train(config: RunConfig, run: RunFolder) -> None:
    """Trains `config` in `run` until it is done (returns) or stopped early but resumable (raises Stopped)."""
    _refuse_what_is_not_here(config)
    run.acquire()
    try:
        session = _open(config, run)
        if session.progress.step >= session.total and (run.final / "config.json").is_file():
            print(f"{run.path}: already done ({session.total} steps); to train longer, begin another run: name=NEW")
        else:
            _run(session)
        run.set_status("done", session.total, session.total, resumable=False)
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
    kind, parallel = config.method.kind, config.parallel
    if config.model.base is not None or kind != "pretrain":
        raise UserError(
            f"method.kind: this version trains new models only, not {kind} of an existing one; try: sojourn train small"
        )
    if config.train.attention == "flash_attention_2":
        raise UserError("train.attention: flash_attention_2 is not used yet; leave it at auto")
    several = isinstance(parallel.gpus, list) and len(parallel.gpus) > 1
    if parallel.engine not in ("auto", "single") or several:
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
    if artefact.is_pairs:
        raise UserError(
            "data.sources: preference pairs are prepared, but not trained on yet; to learn the better answers: "
            "data.columns.prompt=prompt data.columns.completion=chosen"
        )
    run.set_status("starting", 0, 0)
    write_text(run.config, to_yaml(config))
    facts = {**describe(device), "auto": resolved.reasons, "data": str(artefact.path.resolve())}
    write_json(run.environment, facts)

    seed = config.train.seed
    model = build_model(
        config.model, artefact.vocab_size, artefact.max_length, artefact.pad_id, artefact.stop_ids, seed
    )
    model.to(device).train()
    if config.train.checkpointing == "full":
        model.gradient_checkpointing_enable()
    if config.train.compile == "on":
        model.get_decoder().compile()
    # Weights and two moments of 32 bits: told now rather than at the first save.
    check_room(run.path, 12 * sum(p.numel() for p in model.parameters()), int(config.save.min_free))
    torch.manual_seed(seed)
    scaler = torch.amp.GradScaler(device, enabled=config.train.precision == "fp16")
    live = Live(model, Optimizer(model, config.train, device), scaler)
    feed = Feed(
        int(config.train.micro_batch),
        artefact.max_length,
        artefact.pad_id,
        device,
        str(config.train.precision),
        fit=artefact.facts["packing"] == "off",
    )
    return Session(config, run, artefact, feed, live, resume(config.save, run, live), *_length(config, artefact))


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


def _run(session: Session) -> None:
    """From where the run is to its end."""
    config, run, total = session.config, session.run, session.total
    live, progress, train_rows = session.live, session.progress, session.artefact.train
    run.event("start", step=progress.step, total_steps=total, device=session.feed.device,
              precision=session.feed.precision, parameters=sum(p.numel() for p in live.model.parameters()))  # fmt: skip
    run.set_status("running", progress.step, total)
    saver = Saver(config, run, live, progress, len(train_rows))
    with Guard(config.limits, before=progress.seconds) as guard, Meters(run, config, total, progress.step) as meters:
        while progress.step < total:
            rate = learning_rate(progress.step, total, config.train)
            live.optimizer.set_learning_rate(rate)
            rows = step_rows(
                progress.step, len(train_rows), config.train.global_batch, config.train.seed, session.last_row
            )
            batches = list(session.feed.batches(train_rows, rows))
            loss, norm = global_step(live.model, live.optimizer, live.scaler, batches, session.feed, config.train.clip)
            tokens = sum(batch.real_tokens for batch in batches)
            meters.count(tokens)
            progress.step += 1
            progress.tokens += tokens
            progress.seconds = guard.seconds

            last = progress.step == total
            stop = None if last else guard.should_stop()
            save_now = saver.due() or last or stop is not None
            log_now = progress.step % config.log.every_steps == 0 or progress.step == 1 or last
            if log_now or save_now:
                _check_finite(
                    float(loss), progress.step, rate
                )  # before a save: a broken model must not replace a good one
            if log_now:
                epoch = progress.step * config.train.global_batch / len(train_rows)
                meters.log(progress.step, float(loss), rate, float(norm), epoch, guard.spent)
            with meters.paused():
                if save_now:
                    saver.save(meters, total, must=last or stop is not None)
                if _eval_due(config, progress.step, total):
                    _evaluate(session, meters)
            if stop:
                run.set_status("stopped", progress.step, total, stop)
                run.event("stopped", step=progress.step, why=stop)
                raise Stopped(f"stopped by {stop} at step {progress.step} of {total}, saved in {run.path}; "
                              "the same command continues")  # fmt: skip
        write_final(live.model, session.artefact, run.final, session.feed.precision)
    run.event("done", step=total, tokens=progress.tokens, seconds=round(progress.seconds, 1))


def _check_finite(loss: float, step: int, rate: float) -> None:
    if not math.isfinite(loss):
        smaller = f"train.lr={rate / 3:.1g} name=NEW"
        raise RunFailed(f"step {step}: the loss is {loss}, so nothing more is saved; try a smaller rate: {smaller}")


def _eval_due(config: RunConfig, step: int, total: int) -> bool:
    every = config.train.eval_every
    return step == total or (every is not None and step % every == 0)


def _evaluate(session: Session, meters: Meters) -> None:
    held_out = session.artefact.eval
    if len(held_out):
        loss = evaluate(session.live.model, held_out, session.config.train.eval_rows, session.feed)
        meters.log_eval(session.progress.step, loss)
