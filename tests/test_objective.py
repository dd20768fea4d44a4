"""An objective is one file and one line of registration: loop, step, batcher and CUDA graphs need no change for it."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shared import COLOURS, THINGS
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.train.batcher import Batcher
from sojourn.train.cuda_graphs import graph_shape, pad_to_shape
from sojourn.train.objective import registry
from tiny import losses, run_train, weights

BETA = 0.1


@dataclass(frozen=True)
class PairLoss:
    """DPO without a reference model: chosen answers should be likelier than rejected ones. The mean over pairs."""

    is_per_token = False
    needs_documents = True
    needs_padding = False

    def weight(self, batch: Batch) -> int:
        has_target = batch.labels >= 0
        return sum(len(np.unique(row[mask])) for row, mask in zip(batch.documents, has_target, strict=True)) // 2

    def _margins(self, network, batch):
        logits = network.lm_head(batch.target_hidden(network)).float()
        counts = batch.labels_N >= 0
        logps = -F.cross_entropy(logits, batch.labels_N.clamp(min=0), reduction="none") * counts
        room = batch.ids_BT.numel() // 2 * 2  # more than there can be documents, and known without their values
        per_document = torch.zeros(room).index_add(0, batch.target_documents_N, logps)
        is_real = torch.zeros(room).index_add(0, batch.target_documents_N, counts.float()) > 0
        return (per_document[0::2] - per_document[1::2]) * BETA, is_real[0::2]

    def loss_sum(self, network, batch):
        margins, is_real = self._margins(network, batch)
        return -(F.logsigmoid(margins) * is_real).sum()

    def score(self, network, batch):
        margins, is_real = self._margins(network, batch)
        return -(F.logsigmoid(margins) * is_real).sum(), ((margins > 0) & is_real).sum()


@pytest.fixture
def pairs(tiny):
    path = tiny.home / "pairs.jsonl"
    lines = [
        {
            "prompt": f"What colour is the {THINGS[i % 8]} of house {i}?",
            "chosen": f"It is {COLOURS[i // 8 % 8]}.",
            "rejected": f"It was {COLOURS[i // 8 % 8]}.",
        }
        for i in range(400)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return (f"data.sources={path}", "data.eval_fraction=0.1", "train.eval_every=6")


def test_a_registered_pair_loss_trains_the_same_whatever_the_micro_batch(tiny, pairs, monkeypatch):
    monkeypatch.setitem(registry.OBJECTIVES, "pairs", lambda config: PairLoss())
    runs = [run_train(tiny.words(*pairs, f"train.micro_batch={rows}")) for rows in (1, 4)]
    one, four = map(losses, runs)
    assert one == pytest.approx(four, rel=1e-5) and 0 < one[-1] < one[0]
    mine, others = map(weights, runs)
    for name in mine:
        torch.testing.assert_close(mine[name], others[name], rtol=1e-3, atol=1e-5)
    held_out = [[line for line in run.read_metrics() if line["kind"] == "eval"] for run in runs]
    assert [line["loss"] for line in held_out[0]] == pytest.approx([line["loss"] for line in held_out[1]], rel=1e-4)
    assert "bits_per_byte" not in held_out[0][0]  # which a loss over pairs does not give


def test_pairs_without_an_objective_for_them_are_refused_in_one_line(tiny, pairs):
    with pytest.raises(UserError, match="preference pairs is not supported yet") as refused:
        run_train(tiny.words(*pairs))
    assert "\n" not in str(refused.value)


def test_the_documents_of_targets_are_counted_over_all_rows_and_survive_padding_to_a_graph_shape():
    documents = np.array([[0, 0, 1, 1, -1, -1, -1, -1], [0, 1, 1, 1, -1, -1, -1, -1]], np.int32)
    labels = np.where(documents >= 0, 5, -100)
    positions = np.zeros(documents.shape, np.int64)
    batch = Batch(np.ones(documents.shape, np.int64), labels, positions, documents)
    for unpad in (False, True):
        made = Batcher(2, 8, 0, "cpu", unpad=unpad, needs_documents=True).to_device(batch)
        assert made.target_documents_N.tolist() == [0, 0, 1, 1, 2, 3, 3, 3]
    made = Batcher(2, 8, 0, "cpu", backend="varlen", needs_documents=True).to_device(batch)
    shape = graph_shape(made)
    padded = pad_to_shape(made, shape.grow(graph_shape(made)))
    assert padded.target_documents_N.tolist()[:8] == [0, 0, 1, 1, 2, 3, 3, 3]
    assert len(padded.target_documents_N) == len(padded.labels_N) == shape.targets
