"""A step's loss: packing and splitting change nothing but rounding, and documents do not see each other."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.data.prepare import prepare
from sojourn.model.scratch import build_model
from sojourn.plan.shape import scratch_shape
from sojourn.train.optim import Optimizer, learning_rate
from sojourn.train.step import Feed, global_step, loss_sum


@pytest.fixture
def setting(words, home):
    config = load_run(words).config
    artefact = prepare(config.data, home / "prepared")
    model = build_model(config.model, artefact.vocab_size, 64, artefact.pad_id, [0], seed=3)
    return config, artefact, model


def _alone(batch: Batch, row: int, document: int) -> Batch:
    """One document of a packed row, by itself."""
    here = batch.documents[row] == document
    return Batch(*(getattr(batch, name)[row][here][None] for name in ("ids", "labels", "positions", "documents")))


def test_a_packed_row_costs_what_its_documents_cost_alone(setting):
    _, artefact, model = setting
    batch = next(Feed(4, 64, artefact.pad_id, "cpu").batches(artefact.train, np.arange(4)))
    packed = float(loss_sum(model, batch, "cpu").detach())
    alone = sum(
        float(loss_sum(model, _alone(batch, row, document), "cpu").detach())
        for row in range(4)
        for document in range(batch.documents[row].max() + 1)
    )
    assert packed == pytest.approx(alone, rel=1e-5)


def test_the_loss_equals_plain_transformers_on_one_document(setting):
    _, artefact, model = setting
    batch = _alone(next(Feed(1, 64, artefact.pad_id, "cpu").batches(artefact.train, np.arange(1))), 0, 0)
    logits = model(input_ids=torch.from_numpy(batch.ids)).logits[0].log_softmax(-1)
    labels = batch.labels[0]
    plain = -sum(float(logits[t, labels[t]].detach()) for t in range(len(labels)) if labels[t] >= 0)
    assert float(loss_sum(model, batch, "cpu").detach()) == pytest.approx(plain, rel=1e-5)


def test_micro_batches_of_any_size_give_the_same_step(setting, words):
    config, artefact, _ = setting
    results = []
    for micro in (8, 4, 1):
        model = build_model(config.model, artefact.vocab_size, 64, artefact.pad_id, [0], seed=3)
        train = config.train.model_copy(update={"lr": 1e-3})
        optimizer = Optimizer(model, train, "cpu")
        feed = Feed(micro, 64, artefact.pad_id, "cpu")
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        losses = []
        for step in range(3):
            optimizer.set_learning_rate(learning_rate(step, 3, train))
            batches = list(feed.batches(artefact.train, np.arange(step * 8, step * 8 + 8)))
            losses.append(float(global_step(model, optimizer, scaler, batches, feed, 1.0)[0]))
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


def test_the_planned_number_of_parameters_is_the_real_one(setting):
    config, artefact, model = setting
    shape = scratch_shape(config.model, artefact.vocab_size)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv", [1, 2, "auto"])
def test_the_plan_counts_parameters_for_every_shape(setting, tied, kv):
    config, _, _ = setting
    model = config.model.model_copy(update={"d_model": 128, "num_heads": 2, "num_kv_heads": kv, "tie_embeddings": tied})
    built = build_model(model, 500, 64, 0, [0], seed=0)
    assert scratch_shape(model, 500).parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_learning_rate_warms_up_and_comes_down(setting, schedule):
    train = setting[0].train.model_copy(update={"lr": 1e-3, "schedule": schedule, "warmup": 0.1, "min_lr": 0.1})
    rates = [learning_rate(step, 100, train) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4) and max(rates) == pytest.approx(1e-3) and rates[9] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-3 if schedule == "constant" else 1e-4, rel=0.01)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_optimizer_state_survives_a_round_trip(setting):
    config, artefact, _ = setting
    train = config.train.model_copy(update={"lr": 1e-3})
    feed = Feed(8, 64, artefact.pad_id, "cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = list(feed.batches(artefact.train, np.arange(8)))

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.set_learning_rate(1e-3)
            loss, _ = global_step(model, optimizer, scaler, batches, feed, 1.0)
        return float(loss)

    model = build_model(config.model, artefact.vocab_size, 64, artefact.pad_id, [0], seed=3)
    optimizer = Optimizer(model, train, "cpu")
    steps(model, optimizer, 2)
    twin = build_model(config.model, artefact.vocab_size, 64, artefact.pad_id, [0], seed=9)
    twin.load_state_dict(model.state_dict())
    other = Optimizer(twin, train, "cpu")
    other.load_tensors({key: value.clone() for key, value in optimizer.tensors().items()})
    assert steps(model, optimizer, 3) == steps(twin, other, 3)


def test_weight_decay_leaves_norms_and_embeddings_alone(setting):
    config, _, model = setting
    optimizer = Optimizer(model, config.train, "cpu")
    decay = {id(p): group["weight_decay"] for group in optimizer.torch.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or "embed" in name else config.train.weight_decay)
