"""How good a model is: loss and perplexity on held-out rows, and exact answers to held-out questions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sojourn.data import builtin
from sojourn.data.artefact import Artefact
from sojourn.errors import UserError
from sojourn.infer.generate import Sampling, as_prompt, generate
from sojourn.infer.load import Model
from sojourn.model.network import close_network, open_network
from sojourn.run.folder import RunFolder
from sojourn.storage.files import read_json
from sojourn.train.batcher import Batcher
from sojourn.train.step import evaluate


@dataclass(frozen=True)
class Answered:
    task: builtin.Task
    reply: str
    right: bool


def ask_held_out(model: Model, per_family: int, families: tuple[str, ...] | None = None) -> dict[str, list[Answered]]:
    """Greedy answers to questions that are never trained on, by family."""
    names = families or tuple(builtin.FAMILIES)
    drawn = (builtin.instructions(per_family, seed=1, families=(name,), split="held_out") for name in names)
    tasks = [task for family in drawn for task in family]
    alike = sorted(range(len(tasks)), key=lambda i: len(tasks[i].prompt))  # neighbours of like length: little padding
    texts = generate(model, [as_prompt(model, tasks[i].prompt) for i in alike], Sampling(max_tokens=32))
    replies = dict(zip(alike, texts, strict=True))
    answered = [Answered(task, replies[i], builtin.verify(task, replies[i])) for i, task in enumerate(tasks)]
    return {name: [one for one in answered if one.task.family == name] for name in names}


def accuracy(answered: list[Answered]) -> float:
    return sum(one.right for one in answered) / len(answered) if answered else math.nan


def held_out_loss(model: Model, run: RunFolder, rows: int) -> float:
    """Mean loss per trained token on the rows that the run kept apart."""
    data = (read_json(run.environment) or {}).get("data")
    if not data or not (Path(data) / "artefact.json").is_file():
        raise UserError(f"{run.path}: its prepared data is not on this machine; run: sojourn prepare {run.config}")
    artefact = Artefact(Path(data))
    if not len(artefact.eval):
        return math.nan
    softcap = getattr(model.network.config.get_text_config(), "attn_logit_softcapping", None) is not None
    for backend in ("math" if softcap else "sdpa", None):  # None: its own, as it was trained if ours does not suit it
        network = open_network(model.network, backend)
        batcher = Batcher(
            8, artefact.max_length, artefact.pad_id, model.device, backend=backend, windows=network.windows
        )
        try:
            return evaluate(network, artefact.eval, rows, batcher)[0]
        except NotImplementedError:
            continue
        finally:
            close_network(network)
    return math.nan
