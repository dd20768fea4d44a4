"""A step's loss: packing and splitting change nothing but rounding, and documents do not see each other."""

import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.data.prepare import prepare
from sojourn.model.network import restore_attention, wrap_model
from sojourn.model.scratch import build_model
from sojourn.resolve.new_model import new_model_spec
from sojourn.train.batcher import Batcher
from sojourn.train.distributed.engine import Engine
from sojourn.train.objective.supervised import Supervised
from sojourn.train.optim.muon import Muon, orthogonalize
from sojourn.train.optim.optimizers import Optimizer, learning_rate
from sojourn.train.step import SpeculativeStep, Stepper


@pytest.fixture
def setting(words, home):
    config = load_run(words).config
    artefact = prepare(config.data, home / "prepared")
    return config, artefact, _model(config, artefact)


def _model(config, artefact, seed=3):
    return build_model(config.model, artefact.vocab_size, 64, artefact.pad_id, [0], seed=seed)


def _loss(model, batcher, batch) -> float:
    return float(Supervised().loss_sum(wrap_model(model, "sdpa"), batcher.to_device(batch)).detach())


def _stepper(model, train, batcher):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Stepper(
        Engine(wrap_model(model, batcher.backend), Optimizer(model, train, "cpu"), scaler), batcher, Supervised(), 1.0
    )


def _alone(batch: Batch, row: int, document: int) -> Batch:
    """One document of a packed row, by itself."""
    here = batch.documents[row] == document
    return Batch(*(getattr(batch, name)[row][here][None] for name in ("ids", "labels", "positions", "documents")))


def test_a_packed_row_costs_what_its_documents_cost_alone(setting):
    _, artefact, model = setting
    batcher = Batcher(4, 64, artefact.pad_id, "cpu")
    batch = next(batcher.batches(artefact.train, np.arange(4)))
    packed = _loss(model, batcher, batch)
    alone = sum(
        _loss(model, batcher, _alone(batch, row, document))
        for row in range(4)
        for document in range(batch.documents[row].max() + 1)
    )
    assert packed == pytest.approx(alone, rel=1e-5)


def test_the_loss_equals_plain_transformers_on_one_document(setting):
    _, artefact, model = setting
    batcher = Batcher(1, 64, artefact.pad_id, "cpu")
    batch = _alone(next(batcher.batches(artefact.train, np.arange(1))), 0, 0)
    ours = _loss(model, batcher, batch)
    restore_attention(wrap_model(model, None))
    logits = model(input_ids=torch.from_numpy(batch.ids)).logits[0].log_softmax(-1)
    labels = batch.labels[0]
    plain = -sum(float(logits[t, labels[t]].detach()) for t in range(len(labels)) if labels[t] >= 0)
    assert ours == pytest.approx(plain, rel=1e-5)


def test_micro_batches_of_any_size_give_the_same_step(setting, words):
    config, artefact, _ = setting
    results = []
    for micro in (8, 4, 1):
        train = config.train.model_copy(update={"lr": 1e-3})
        batcher = Batcher(micro, 64, artefact.pad_id, "cpu")
        stepper = _stepper(_model(config, artefact), train, batcher)
        losses = []
        for step in range(3):
            stepper.optimizer.set_learning_rate(learning_rate(step, 3, train))
            batches = list(batcher.batches(artefact.train, np.arange(step * 8, step * 8 + 8)))
            losses.append(float(stepper.step(batches)[0]))
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=1e-5)


def test_nothing_of_a_pass_is_held_when_the_next_begins(setting, monkeypatch):
    """Not even by whoever holds its loss: the head's gradient would wait there."""
    config, artefact, _ = setting
    batcher = Batcher(2, 64, artefact.pad_id, "cpu")
    stepper = _stepper(_model(config, artefact), config.train, batcher)
    batches = list(batcher.batches(artefact.train, np.arange(8)))
    kept, left, real = [], [], Stepper._loss_sum

    def watched(*given):
        left.append([graph for graph in kept if graph() is not None])
        made = real(*given)
        kept.append(weakref.ref(made.grad_fn))
        return made

    monkeypatch.setattr(Stepper, "_loss_sum", watched)
    begun = SpeculativeStep(0, batches, 0.0, 2, stepper.speculative_forward(batches))
    stepper.launch_gradients(batches, begun)
    assert left == [[]] * 4 and all(graph() is None for graph in kept) and begun.loss_share is not None


def test_the_planned_number_of_parameters_is_the_real_one(setting):
    config, artefact, model = setting
    shape = new_model_spec(config.model, artefact.vocab_size)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv", [1, 2, "auto"])
def test_the_plan_counts_parameters_for_every_shape(setting, tied, kv):
    config, _, _ = setting
    model = config.model.model_copy(update={"d_model": 128, "num_heads": 2, "num_kv_heads": kv, "tie_embeddings": tied})
    built = build_model(model, 500, 64, 0, [0], seed=0)
    assert new_model_spec(model, 500).parameters == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_learning_rate_warms_up_and_comes_down(setting, schedule):
    train = setting[0].train.model_copy(update={"lr": 1e-3, "schedule": schedule, "warmup": 0.1, "min_lr": 0.1})
    rates = [learning_rate(step, 100, train) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4) and max(rates) == pytest.approx(1e-3) and rates[9] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-3 if schedule == "constant" else 1e-4, rel=0.01)
    assert all(a >= b for a, b in pairwise(rates[9:]))


_OPTIMIZERS = [
    {}, {"optimizer": "adamw_8bit"}, {"optimizer": "paged_adamw"}, {"optimizer": "paged_adamw_8bit"},
    {"optimizer": "muon"}, {"offload": "optimizer"},
]  # fmt: skip


@pytest.mark.parametrize("chosen", _OPTIMIZERS, ids=str)
@pytest.mark.filterwarnings("ignore:Paged optimizers")
def test_optimizer_state_survives_a_round_trip(setting, chosen):
    config, artefact, _ = setting
    train = config.train.model_copy(update={"lr": 1e-3, **chosen})
    batcher = Batcher(8, 64, artefact.pad_id, "cpu")
    batches = list(batcher.batches(artefact.train, np.arange(8)))

    def steps(stepper, count):
        for _ in range(count):
            stepper.optimizer.set_learning_rate(1e-3)
            loss, _ = stepper.step(batches)
        return float(loss)

    one = _stepper(_model(config, artefact), train, batcher)
    first = steps(one, 2)
    twin = _model(config, artefact, seed=9)
    twin.load_state_dict(one.network.model.state_dict())
    other = _stepper(twin, train, batcher)
    other.optimizer.load_state_tensors({key: value.clone() for key, value in one.optimizer.state_tensors().items()})
    assert steps(one, 3) == steps(other, 3) < first


def test_moments_kept_in_host_memory_change_nothing(setting):
    config, artefact, _ = setting
    batcher = Batcher(8, 64, artefact.pad_id, "cpu")
    ends = []
    for chosen in ({}, {"offload": "optimizer"}):
        stepper = _stepper(_model(config, artefact), config.train.model_copy(update=chosen), batcher)
        for step in range(3):
            stepper.optimizer.set_learning_rate(1e-3)
            stepper.step(list(batcher.batches(artefact.train, np.arange(8 * step, 8 * step + 8))))
        ends.append([p.detach().clone() for p in stepper.network.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:mkldnn", "ignore:.*bf16")
def test_muon_makes_a_step_nearly_orthogonal_and_goes_as_torch_does():
    torch.manual_seed(0)
    for shape in ((48, 32), (32, 48), (32, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(1, *shape)))
        assert values.min() > 0.4 and values.max() < 1.4
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon to compare with")
    ours, theirs = (torch.nn.Parameter(torch.ones(24, 40)) for _ in range(2))
    groups = [{"params": [ours], "weight_decay": 0.1, "matrices": True}]
    mine = Muon(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    torchs = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(24, 40)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        torchs.step()
    moved = (theirs - 1).norm()
    assert (ours - theirs).norm() / moved < 0.02  # torch's rounds to bf16


def test_weight_decay_leaves_norms_and_embeddings_alone(setting):
    config, _, model = setting
    optimizer = Optimizer(model, config.train, "cpu")
    decay = {id(p): group["weight_decay"] for group in optimizer.torch.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or "embed" in name else config.train.weight_decay)
