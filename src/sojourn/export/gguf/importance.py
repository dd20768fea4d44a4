"""An importance matrix: how large the inputs of each layer are on the run's own data, so that quantization spends its
precision where it matters. One number per column of each weight: the mean of the squared inputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sojourn.data.artefact import Artefact, artefact_of
from sojourn.errors import UserError
from sojourn.export.gguf.model_config import read_config
from sojourn.export.open_source import Source
from sojourn.export.progress import Progress
from sojourn.infer.gguf.families import EMBEDDING, OUTPUT
from sojourn.infer.model_from_weights import build_model
from sojourn.infer.weight_source import WeightSource
from sojourn.machine.hardware import memory

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 32_768
_SHARE = 1 / 3  # of the free memory that the model may take


def importance_matrix(source: Source, progress: Progress) -> dict[str, Tensor] | None:
    """By llama.cpp's name of the weight. None, after a line, where there is no data or not enough memory."""
    reason = _unavailable(source)
    if reason:
        progress.say(f"note: without an importance matrix: {reason}")
        return None
    assert source.run is not None  # noqa: S101
    texts = calibration_texts(artefact_of(source.run))
    progress.start("importance matrix", sum(map(len, texts)))
    return measure(source.weights, texts, progress)


def _unavailable(source: Source) -> str:
    if source.run is None:
        return "only a run has data to measure it on"
    try:
        artefact_of(source.run)
    except UserError as error:
        return str(error)
    needed = 4 * sum(math.prod(source.weights.shape(name)) for name in source.weights.names())
    free = memory().available
    if needed > free * _SHARE:
        return f"the model takes {needed / 2**30:.1f} GiB in fp32, more than a third of the {free / 2**30:.1f} GiB free"
    return ""


def calibration_texts(artefact: Artefact) -> list[list[int]]:
    """Rows from all over the training data, at most `MOST_TOKENS` tokens."""
    split = artefact.train
    wanted = max(MOST_TOKENS // max(artefact.row_length, 1), 1)
    step = max(len(split) // wanted, 1)
    texts: list[list[int]] = []
    for row in range(0, len(split), step):
        if sum(map(len, texts)) >= MOST_TOKENS:
            break
        texts.append([int(token) for token in split.row(row)[0]])
    return [text for text in texts if text]


def measure(weights: WeightSource, texts: list[list[int]], progress: Progress) -> dict[str, Tensor]:
    import torch

    family = read_config(weights.config).family
    model = build_model(weights, "importance matrix")
    sums: dict[str, Any] = {}
    tokens = 0

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            squares = inputs[0].float().reshape(-1, inputs[0].shape[-1]).square().sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    tied = "lm_head.weight" not in weights.names()
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            ours = family.gguf_name(f"{module_name}.weight")
            if ours is not None:
                module.register_forward_pre_hook(watch(EMBEDDING if ours == OUTPUT and tied else ours))
    with torch.inference_mode():
        for text in texts:
            model(input_ids=torch.tensor([text]), use_cache=False)
            tokens += len(text)
            progress.advance(len(text))
    return {name: (total / max(tokens, 1)).contiguous() for name, total in sums.items()}
