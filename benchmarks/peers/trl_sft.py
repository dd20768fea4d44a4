"""Peer: TRL's SFTTrainer with its own loop and log, on our packed rows, labels and row order."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.harness import PeerTask, StepTimer
from benchmarks.peers.hugging_face import open_model


def run_trl(task: PeerTask) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    timer = StepTimer(task)

    class Timing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            timer.step_done(state.global_step)

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = task.batch(np.array([item["row"] for item in items]))
        labels = np.full_like(batch.labels, -100)
        labels[:, 1:] = batch.labels[:, :-1]  # the model shifts labels by one itself
        arrays = {"input_ids": batch.ids, "labels": labels, "position_ids": batch.positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    indices = list(chain.from_iterable(task.row_indices(step).tolist() for step in range(task.steps)))
    settings = SFTConfig(
        output_dir=str(Path(task.out).parent / "trl"), max_steps=task.steps, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=task.micro_batch, gradient_accumulation_steps=task.global_batch // task.micro_batch,
        learning_rate=task.lr, lr_scheduler_type="constant", warmup_steps=0, weight_decay=task.weight_decay,
        adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=task.clip, optim="adamw_torch_fused", seed=0,
        bf16=task.precision == "bf16", gradient_checkpointing=task.gradient_checkpointing, report_to="none",
        gradient_checkpointing_kwargs={"use_reentrant": False}, remove_unused_columns=False, max_length=None,
        disable_tqdm=True, packing=False, dataset_kwargs={"skip_prepare_dataset": True}, use_cpu=task.device == "cpu",
    )  # fmt: skip
    trainer = InOrder(
        model=open_model(task), args=settings, train_dataset=Dataset.from_dict({"row": indices}),
        data_collator=collate, processing_class=AutoTokenizer.from_pretrained(task.base), callbacks=[Timing()],
    )  # fmt: skip
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    tokens = [sum(batch.real_tokens for batch in task.batches(step)) for step in range(task.steps)]
    return timer.result([line["loss"] for line in logged], float(logged[0]["grad_norm"]), tokens)
