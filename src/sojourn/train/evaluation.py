"""Evaluation during training: held-out scores, samples, the best model so far, and when to wait no longer."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact
from sojourn.errors import RunFailed
from sojourn.run.folder import RunFolder
from sojourn.train.batcher import Batcher
from sojourn.train.checkpoint.final_model import write_final_model
from sojourn.train.checkpoint.saving import Progress
from sojourn.train.distributed.engine import Engine
from sojourn.train.metrics.meters import EvalScores, Meters
from sojourn.train.samples import Samples
from sojourn.train.step import evaluate


class Evaluator:
    """An evaluation is only noted when all of it is done: one that a stop cut short is made by the next call."""

    def __init__(self, config: RunConfig, run: RunFolder, artefact: Artefact, engine: Engine, batcher: Batcher) -> None:
        self._config, self._run, self._artefact, self._engine, self._feed = config, run, artefact, engine, batcher
        self._network, self._ranks = engine.network, engine.ranks
        self.seconds: float | None = None  # that the last one took

    def due(self, progress: Progress, total: int) -> bool:
        every, step = self._config.train.eval_every, progress.step
        wanted = step == total or (every is not None and step % every == 0)
        return wanted and step not in (0, progress.evaluated_step)

    def assess(self, progress: Progress, meters: Meters) -> str | None:
        """EvalScores, samples and perhaps a new `best/`; returns why to stop, if patience has run out."""
        began, train = time.monotonic(), self._config.train
        wanted = train.samples or (train.eval_every is not None and len(self._artefact.eval))
        if wanted:
            self._sample(progress.step, meters)
        if not len(self._artefact.eval):
            progress.evaluated_step = progress.step
            return None
        loss, accuracy = evaluate(self._network, self._artefact.eval, train.eval_rows, self._feed, self._engine)
        best = progress.is_best(loss)
        bits = loss * self._targets / math.log(2) / self._bytes if self._bytes else None
        meters.log_eval(progress.step, EvalScores(loss, math.exp(min(loss, 700.0)), accuracy, bits, best))
        kept = True
        if best and train.eval_every is not None:
            weights = self._engine.full_weights()
            if self._ranks.is_main:
                kept = self._keep_best(weights, progress.step, loss, meters)
            self._ranks.barrier()
        progress.note(loss, kept=not self._ranks.any(not kept))
        self.seconds = time.monotonic() - began
        if train.patience is not None and progress.evaluations_without_improvement >= train.patience:
            return (
                f"train.patience: no better held-out loss in {progress.evaluations_without_improvement} evaluations "
                f"(best {progress.best_loss or math.nan:.4f} at step {progress.best_step})"
            )
        return None

    def _sample(self, step: int, meters: Meters) -> None:
        """By the first process; where weights are cut, all must say the same words with it."""
        syncs_every_micro_batch = self._engine.syncs_every_micro_batch
        with nullcontext() if syncs_every_micro_batch else self._ranks.raise_oom_on_all_ranks():
            if self._ranks.is_main or syncs_every_micro_batch:
                make = partial(self._samples.generate, self._network, self._feed.autocast(), self._feed.device)
                with torch.no_grad():
                    meters.log_samples(step, self._engine.run(make))

    def _keep_best(self, weights: dict[str, Any], step: int, loss: float, meters: Meters) -> bool:
        """Whether it could be written: a disk that is too full for it does not end the run."""
        try:
            write_final_model(self._network.model, weights, self._artefact, self._run.best, self._config)
            self._run.event("best", step=step, loss=loss)
        except (OSError, RunFailed) as error:
            self._run.event("best_failed", step=step, message=str(error))
            meters.say(f"warning: {self._run.best} could not be written ({error}); training goes on without it")
            return False
        return True

    @cached_property
    def _samples(self) -> Samples:
        return Samples(self._config, self._artefact)

    @cached_property
    def _targets(self) -> int:
        rows = np.arange(min(self._config.train.eval_rows, len(self._artefact.eval)))
        return sum(batch.targets for batch in self._feed.batches(self._artefact.eval, rows))

    @cached_property
    def _bytes(self) -> int:
        """Of the text that the held-out targets spell; special tokens spell none."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._artefact.tokenizer / "tokenizer.json"))
        split, total = self._artefact.eval, 0
        for number in range(min(self._config.train.eval_rows, len(split))):
            ids, mask, starts = split.row(number)
            for document, trained in zip(np.split(ids, starts[1:]), np.split(mask, starts[1:]), strict=True):
                spelled = [int(i) for i in document[1:][trained[1:] == 1]]
                total += len(tokenizer.decode(spelled, skip_special_tokens=True).encode())
        return total
