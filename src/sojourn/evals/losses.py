"""The loss of a model on prepared rows, document by document, so that it has a confidence interval."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sojourn.data.artefact import Artefact, Split
from sojourn.errors import UserError
from sojourn.infer.load import LoadedModel
from sojourn.model.loss import token_losses
from sojourn.model.network import Network, restore_attention, wrap_model
from sojourn.model.parity_check import check_packing
from sojourn.train.batcher import Batcher, number_documents
from sojourn.train.evaluation import target_bytes


@dataclass(frozen=True)
class Losses:
    """Of each document: summed loss, tokens, tokens predicted first, bytes of text. `data`: a hash of all of them."""

    data: str
    rows: int
    loss: np.ndarray
    tokens: np.ndarray
    correct: np.ndarray
    bytes: np.ndarray


def document_losses(loaded: LoadedModel, artefact: Artefact, name: Literal["train", "eval"], rows: int) -> Losses:
    """On the first `rows` rows of a split."""
    split = artefact.eval if name == "eval" else artefact.train
    has_softcap = getattr(loaded.model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    for backend in ("math" if has_softcap else "sdpa", None):  # None: the model's own attention, if ours does not fit
        network = wrap_model(loaded.model, backend)
        batcher = Batcher(
            8, artefact.row_length, artefact.pad_id, loaded.device, backend=network.attention_backend,
            needs_documents=True,
        )  # fmt: skip
        batcher.windows = network.sliding_windows
        try:
            check_packing(network, loaded.device, artefact.facts["packing"] != "off")
            found = _score(network, split, rows, batcher)
        except NotImplementedError:
            continue
        finally:
            restore_attention(network)
        sizes = np.fromiter(target_bytes(split, rows, _tokenizer(artefact)), np.float64)
        scored = found[1] > 0
        if not scored.any() or not np.isfinite(found[0]).all():
            raise UserError(f"{loaded.path}: these rows hold no tokens to score, or the model's loss is not a number")
        parts = [values[scored] for values in (*found, sizes)]
        files = {file: facts["sha256"] for file, facts in artefact.facts["files"].items() if file.startswith(name)}
        return Losses(json.dumps(files, sort_keys=True), min(rows, len(split)), *parts)
    raise UserError(f"{loaded.path}: packed rows cannot be scored with this model's attention; set data.packing=off")


def _tokenizer(artefact: Artefact) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(artefact.tokenizer / "tokenizer.json"))


def _score(network: Network, split: Split, rows: int, batcher: Batcher) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss, tokens and correct tokens of all documents in order."""
    import torch

    found: list[np.ndarray] = []
    with torch.no_grad(), batcher.autocast():
        for batch in batcher.batches(split, np.arange(min(rows, len(split)))):
            count = int(number_documents(batch).max()) + 1
            totals = np.zeros((3, count))
            if batch.targets:
                ready = batcher.to_device(batch)
                losses, correct = token_losses(network.lm_head, ready.target_hidden(network), ready.labels_N)
                assert ready.target_documents_N is not None  # noqa: S101
                at = ready.target_documents_N.cpu().numpy()
                columns = (losses, torch.ones_like(losses), correct)
                totals = np.stack([np.bincount(at, one.double().cpu().numpy(), count) for one in columns])
            found.append(totals)
    loss, tokens, correct_tokens = np.concatenate(found, 1) if found else np.zeros((3, 0))
    return loss, tokens, correct_tokens


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0)) if not math.isnan(loss) else math.nan
