"""Training, from a configuration to `final/`: one loop for every device. A second call on the same run continues it.

The order of things: resolve what the machine decides → the prepared data → the model → the newest good checkpoint, if
any → steps, with saves between them → the final model. A signal or a limit ends the loop after the step in hand.
"""

from __future__ import annotations

import math
import time

from sojourn.config.load import to_yaml
from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.data.order import step_rows
from sojourn.data.prepare import prepare
from sojourn.errors import RunFailed, Stopped, UserError
from sojourn.model.scratch import build_model
from sojourn.plan.shape import scratch_shape
from sojourn.run.files import write_json, write_text
from sojourn.run.folder import RunFolder
from sojourn.run.home import prepared_folder
from sojourn.train.changes import refuse_harmful_changes
from sojourn.train.environment import describe
from sojourn.train.final import stop_ids, write_final
from sojourn.train.guard import Guard
from sojourn.train.meters import Meters
from sojourn.train.optim import Optimizer, learning_rate
from sojourn.train.resolve import resolve
from sojourn.train.saving import Live, Saver, resume
from sojourn.train.step import autocast, evaluate, loss_sum, micro_batches


def train(config: RunConfig, run: RunFolder) -> None:
    """Trains `config` in `run` until it is done (returns) or stopped early but resumable (raises Stopped)."""
    _refuse_what_is_not_here(config)
    run.acquire()
    try:
        _train(config, run)
    except Stopped:
        raise
    except BaseException as error:
        status = run.status()
        run.set_status("failed", status.step if status else 0, status.total_steps if status else 0, f"{type(error).__name__}: {error}")
        run.event("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        run.release()


def _refuse_what_is_not_here(config: RunConfig) -> None:
    if config.model.base is not None or config.method.kind != "pretrain":
        raise UserError(f"method.kind: {config.method.kind} of an existing model cannot be trained by this version yet; "
                        "from scratch works: sojourn train small")
    if config.parallel.engine not in ("auto", "single") or (isinstance(config.parallel.gpus, list) and len(config.parallel.gpus) > 1):
        raise UserError("parallel: this version trains on one device; use --gpus 0 and leave parallel.engine at auto")


def _train(config: RunConfig, run: RunFolder) -> None:
    import torch

    run.set_status("starting", 0, 0)
    artefact = prepare(config.data, prepared_folder(), lambda line: print(line, flush=True))
    shape = scratch_shape(config.model, artefact.vocab_size)
    resolved = resolve(config, shape.parameters)
    if run.exists():
        refuse_harmful_changes(resolved.config, run)
    config = resolved.config
    write_text(run.config, to_yaml(config))
    write_json(run.environment, {**describe(config.train.device), "auto": resolved.reasons, "data": str(artefact.path)})

    device = _use(config)
    stops = stop_ids(artefact)
    model = build_model(config.model, artefact.vocab_size, artefact.max_length, artefact.pad_id, stops, config.train.seed)
    model.config._attn_implementation = config.train.attention
    model.to(device).train()
    if config.train.checkpointing == "full":
        model.gradient_checkpointing_enable()
    optimizer = Optimizer(model, config.train, device)
    scaler = torch.amp.GradScaler(device, enabled=config.train.precision == "fp16")
    torch.manual_seed(config.train.seed)

    total, last_row = _length(config, artefact)
    live = Live(model, optimizer, scaler)
    progress = resume(config.save, run, live)
    if progress.step >= total and (run.final / "config.json").is_file():
        run.set_status("done", progress.step, total, resumable=False)
        print(f"{run.path}: already done ({total} steps); to train longer raise train.steps or train.epochs under a new name=")
        return
    run.event("start", step=progress.step, total_steps=total, parameters=shape.parameters, device=device, precision=config.train.precision)
    run.set_status("running", progress.step, total)
    began = time.monotonic()

    forward = torch.compile(loss_sum) if config.train.compile == "on" else loss_sum
    saver = Saver(config, run, live, progress, len(artefact.train))
    with Guard(config.limits, before=progress.seconds) as guard, Meters(run, config, total, progress.step) as meters:
        while progress.step < total:
            rate = learning_rate(progress.step, total, config.train)
            optimizer.set_learning_rate(rate)
            rows = step_rows(progress.step, len(artefact.train), config.train.global_batch, config.train.seed, last_row)
            batches = list(micro_batches(artefact.train, rows, int(config.train.micro_batch), artefact.max_length, artefact.pad_id))
            targets = max(1, sum(batch.targets for batch in batches))
            loss = torch.zeros((), device=device)
            for batch in batches:
                with autocast(device, config.train.precision):
                    part = forward(model, batch, device) / targets
                scaler.scale(part).backward()
                loss += part.detach()
            for optimizer_part in optimizer.parts:
                scaler.unscale_(optimizer_part)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip or math.inf)
            for optimizer_part in optimizer.parts:
                scaler.step(optimizer_part)
            scaler.update()
            optimizer.zero_grad()
            progress.step += 1
            tokens = sum(batch.real_tokens for batch in batches)
            progress.tokens += tokens
            progress.seconds = guard.seconds
            meters.count(tokens)

            if progress.step % config.log.every_steps == 0 or progress.step in (1, total):
                value = float(loss)
                if not math.isfinite(value):
                    raise RunFailed(f"step {progress.step}: the loss is {value}; the last checkpoint is untouched. "
                                    f"Try a smaller learning rate (train.lr={rate / 3:.1g}) under a new name=")
                epoch = progress.step * config.train.global_batch / len(artefact.train)
                meters.log(progress.step, value, rate, float(norm), epoch, guard.spent)
            since = meters.pause()
            stop = guard.should_stop()
            if saver.due() or (stop and progress.step < total):
                saver.save(meters, total, must=bool(stop))
            if _eval_due(config, progress.step, total) and len(artefact.eval):
                held = evaluate(model, artefact.eval, config.train.eval_rows, int(config.train.micro_batch),
                                artefact.max_length, artefact.pad_id, device, config.train.precision)  # fmt: skip
                meters.log_eval(progress.step, held)
            meters.go_on(since)
            if stop and progress.step < total:
                run.set_status("stopped", progress.step, total, stop)
                run.event("stopped", step=progress.step, why=stop)
                raise Stopped(f"stopped by {stop} at step {progress.step} of {total}, saved in {run.path}; "
                              "the same command continues")
        saver.save(meters, total, must=True)
        write_final(model, artefact, run.final, config.train.precision)
    run.set_status("done", total, total, resumable=False)
    run.event("done", step=total, tokens=progress.tokens, seconds=round(progress.seconds, 1), session=round(time.monotonic() - began, 1))


def _use(config: RunConfig) -> str:
    """Makes the chosen device current and returns torch's name for it."""
    import torch

    device = str(config.train.device)
    if device == "cuda" and isinstance(config.parallel.gpus, list):
        number = config.parallel.gpus[0]
        if number >= torch.cuda.device_count():
            raise UserError(f"parallel.gpus: there is no GPU {number}; this machine has {torch.cuda.device_count()}")
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


def _eval_due(config: RunConfig, step: int, total: int) -> bool:
    every = config.train.eval_every
    return step == total or (every is not None and step % every == 0)
