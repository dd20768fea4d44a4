"""Evaluation during training: held-out loss, samples, the best model so far, and early stopping.

At the last step, and every `train.eval_every` steps, the first `train.eval_rows` held-out rows give loss, perplexity,
accuracy and bits per byte. The last is the loss of all target tokens in bits, over the bytes of the text that these
tokens spell; special tokens spell none, but their loss counts. With `eval_every`, `best/` holds the model of the lowest
held-out loss so far, in the format of `final/`. After `train.patience` evaluations without a lower loss the run ends as
done, and `final/` is its last state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sojourn.config.schema import RunConfig
from sojourn.data.artefact import Artefact, Batch, Split
from sojourn.errors import RunFailed
from sojourn.model.network import Network
from sojourn.run.folder import RunFolder
from sojourn.run.identity import read_identity
from sojourn.train.batcher import Batcher
from sojourn.train.checkpoint.final_model import write_final_model
from sojourn.train.checkpoint.training_state import Progress
from sojourn.train.distributed.engine import Engine
from sojourn.train.metrics.meters import EvalScores, Meters
from sojourn.train.objective.base import Objective
from sojourn.train.ranks import SINGLE
from sojourn.train.samples import Samples
from sojourn.train.step import Stepper, pad_with_empty_batches, without_targets


def evaluate_rows(
    network: Network, split: Split, rows: int, batcher: Batcher, objective: Objective, engine: Engine | None = None
) -> tuple[float, float]:
    """Loss and accuracy on the first `rows` rows: means over the objective's weight, such as target tokens."""
    loss, correct, weight = 0.0, 0.0, 0
    ranks = engine.ranks if engine is not None else SINGLE
    in_step = engine is not None and engine.syncs_every_micro_batch
    was_training = network.model.training
    network.model.eval()

    def score(batch: Batch) -> tuple[Tensor, Tensor]:
        return objective.score(network, batcher.to_device(batch))

    try:
        with torch.no_grad(), batcher.autocast(), nullcontext() if in_step else ranks.raise_oom_on_all_ranks():
            batches = batcher.batches(split, ranks.shard(np.arange(min(rows, len(split)))))
            if in_step:
                own = list(batches) or [without_targets(one) for one in batcher.batches(split, np.zeros(1, np.int64))]
                batches = iter(pad_with_empty_batches(own, ranks))
            for batch in batches:
                if objective.weight(batch) or in_step:
                    summed = score(batch) if engine is None else engine.run(partial(score, batch))
                    loss, correct = loss + float(summed[0]), correct + float(summed[1])
                    weight += objective.weight(batch)
    finally:
        network.model.train(was_training)
    loss, correct, total = ranks.sum(loss, correct, weight)
    return (loss / total, correct / total) if total else (math.nan, math.nan)


class Evaluator:
    """An evaluation is recorded only when all of it is done: the next call repeats one that a stop interrupted."""

    def __init__(self, config: RunConfig, run: RunFolder, artefact: Artefact, stepper: Stepper) -> None:
        self._config, self._run, self._artefact = config, run, artefact
        self._engine, self._batcher, self._objective = stepper.engine, stepper.batcher, stepper.objective
        self._network, self._ranks = stepper.network, stepper.ranks
        self.seconds: float | None = None  # that the last evaluation took

    def is_due(self, progress: Progress, total_steps: int) -> bool:
        every, step = self._config.train.eval_every, progress.step
        is_due = step == total_steps or (every is not None and step % every == 0)
        return is_due and step not in (0, progress.evaluated_step)

    def evaluate(self, progress: Progress, meters: Meters) -> str | None:
        """Held-out loss, samples, perhaps a new `best/`. Returns why to end the run early, if patience has run out."""
        began, train = time.monotonic(), self._config.train
        if train.samples or (train.eval_every is not None and len(self._artefact.eval)):
            self._log_samples(progress.step, meters)
        if not len(self._artefact.eval):
            progress.evaluated_step = progress.step
            return None
        loss, accuracy = evaluate_rows(
            self._network, self._artefact.eval, train.eval_rows, self._batcher, self._objective, self._engine
        )
        is_best = progress.is_best(loss)
        meters.log_eval(
            progress.step, EvalScores(loss, math.exp(min(loss, 700.0)), accuracy, self._bits_per_byte(loss), is_best)
        )
        is_written = True
        if is_best and train.eval_every is not None:
            weights = self._engine.full_weights()
            if self._ranks.is_main:
                is_written = self._write_best(weights, progress.step, loss, meters)
            self._ranks.barrier()
        progress.record_evaluation(loss, model_written=not self._ranks.any(not is_written))
        self.seconds = time.monotonic() - began
        if train.patience is not None and progress.evaluations_without_improvement >= train.patience:
            return (
                f"train.patience: no better held-out loss in {progress.evaluations_without_improvement} evaluations "
                f"(best {progress.best_loss or math.nan:.4f} at step {progress.best_step})"
            )
        return None

    def _log_samples(self, step: int, meters: Meters) -> None:
        """By rank 0; where weights are sharded, all ranks must generate the same tokens with it."""
        in_step = self._engine.syncs_every_micro_batch
        with nullcontext() if in_step else self._ranks.raise_oom_on_all_ranks():
            if self._ranks.is_main or in_step:
                generate = partial(self._samples.generate, self._network, self._batcher.autocast())
                with torch.no_grad():
                    meters.log_samples(step, self._engine.run(generate))

    def _write_best(self, weights: dict[str, Tensor], step: int, loss: float, meters: Meters) -> bool:
        """Whether it could be written: a disk that is too full for it does not end the run."""
        try:
            identity = read_identity(self._run.identity)
            mark = None if identity is None else {**identity.mark, "step": step}
            write_final_model(self._network.model, weights, self._artefact, self._run.best, self._config, mark)
            self._run.event("best", step=step, loss=loss)
        except (OSError, RunFailed) as error:
            self._run.event("best_failed", step=step, message=str(error))
            meters.say(f"warning: {self._run.best} could not be written ({error}); training continues without it")
            return False
        return True

    @cached_property
    def _samples(self) -> Samples:
        return Samples(self._config, self._artefact)

    def _bits_per_byte(self, loss: float) -> float | None:
        if not self._objective.is_per_token or not self._bytes:
            return None
        return loss * self._targets / math.log(2) / self._bytes

    @cached_property
    def _targets(self) -> int:
        rows = np.arange(min(self._config.train.eval_rows, len(self._artefact.eval)))
        return sum(batch.targets for batch in self._batcher.batches(self._artefact.eval, rows))

    @cached_property
    def _bytes(self) -> int:
        """Of the text that the held-out target tokens spell."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._artefact.tokenizer / "tokenizer.json"))
        return sum(target_bytes(self._artefact.eval, self._config.train.eval_rows, tokenizer))


def target_bytes(split: Split, rows: int, tokenizer: Any) -> Iterator[int]:
    """Of the text that the target tokens spell, by document."""
    for number in range(min(rows, len(split))):
        ids, mask, starts = split.row(number)
        for document, is_target in zip(np.split(ids, starts[1:]), np.split(mask, starts[1:]), strict=True):
            targets = [int(i) for i in document[1:][is_target[1:] == 1]]
            yield len(tokenizer.decode(targets, skip_special_tokens=True).encode())
