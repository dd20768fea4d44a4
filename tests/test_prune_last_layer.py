"""Length buckets and a pruned last layer, as on a CPU, change neither loss nor gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shared import FUSED_CHANGES
from sojourn.catalog.fused_families import FUSED_FAMILIES
from sojourn.config.load import load_run
from sojourn.data.artefact import Batch
from sojourn.errors import UserError
from sojourn.model.activation_checkpointing import apply_activation_checkpointing
from sojourn.model.kernels.fused_forwards import apply_fused_forwards
from sojourn.model.length_buckets import make_length_buckets
from sojourn.model.network import wrap_model
from sojourn.model.parity_check import check_parity
from sojourn.model.prune_last_layer import prune_last_layer
from sojourn.train.batcher import Batcher
from sojourn.train.objective.supervised import Supervised
from sojourn.train.step import without_targets

WIDTH = 48
PACKED = ([9, 14, 3, 16], [25, 1, 6], [11])
UNEVEN = ([2, 3, 1, 5, 2, 9, 4], [46], [11])
UNPACKED = ([48], [20], [31])
FAMILIES = {
    **{family: FUSED_CHANGES.get(family, {}) for family in FUSED_FAMILIES},
    "llama": {},  # which CPU kernels take
    "llama, biased and tied": FUSED_CHANGES["llama"],
    "smollm3, no rope in the first": {"no_rope_layers": [0, 1]},
    "mistral, its window beyond every document": {"sliding_window": 40},
}
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def _batch(lengths, trained: float) -> Batch:
    """Random documents; of their tokens, so many are trained on."""
    random = np.random.default_rng(0)
    shape = (len(lengths), WIDTH)
    batch = Batch(np.zeros(shape, np.int64), np.full(shape, -100), np.zeros(shape, np.int64), np.full(shape, -1))
    for row, sizes in enumerate(lengths):
        start = 0
        for number, size in enumerate(sizes):
            ids = random.integers(1, 90, size)
            here = np.s_[row, start : start + size]
            batch.ids[here], batch.positions[here], batch.documents[here] = ids, np.arange(size), number
            chosen = random.random(size - 1) < trained
            batch.labels[row, start : start + size - 1][chosen] = ids[1:][chosen]
            start += size
    return batch


def _model(family: str):
    torch.manual_seed(0)
    kind = AutoConfig.for_model(family.split(",", maxsplit=1)[0], **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(kind).train()
    for name, one in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(one, 0.5, 1.5)  # so that one that is forgotten, or another's, shows
    return model


def _both(family: str, checkpointing: str = "off"):
    """Twins: one that computes everything, and one that prunes what it can."""
    model = _model(family)
    for twin, prune in ((model, False), (copy.deepcopy(model), True)):
        network = wrap_model(twin, "sdpa")
        if prune:
            apply_fused_forwards(network.base_model)
            network = prune_last_layer(network)
        if checkpointing != "off":
            apply_activation_checkpointing(network.base_model, checkpointing)
        yield network, Batcher(8, WIDTH, 0, "cpu", windows=network.sliding_windows, unpad=prune)


def _gradients(network, batcher, batch):
    loss = Supervised().loss_sum(network, batcher.to_device(batch))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in network.model.named_parameters()}


def _compare(twins, batch):
    (loss, gradients), (pruned_loss, pruned_gradients) = (_gradients(*one, batch) for one in twins)
    torch.testing.assert_close(pruned_loss, loss, rtol=1e-5, atol=0)
    for name, wanted in gradients.items():
        found = pruned_gradients[name]
        assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-6, name


@pytest.mark.parametrize(
    ("family", "lengths", "trained"),
    [
        pytest.param(
            family, lengths, trained, id=f"{family}-{name}-{trained}",
            marks=pytest.mark.slow if (number + at + place) % 2 else [],
        )
        for number, family in enumerate(FAMILIES)
        for at, (name, lengths) in enumerate({"packed": PACKED, "uneven": UNEVEN, "unpacked": UNPACKED}.items())
        for place, trained in enumerate((0.2, 1.0))
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_whole_computation(family, lengths, trained):
    _compare(_both(family), _batch(lengths, trained))


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_activation_checkpointing_changes_nothing(checkpointing):
    _compare(_both("llama", checkpointing), _batch(PACKED, 0.3))


def test_the_parity_check_refuses_a_family_whose_last_layer_is_not_pruned_rightly(monkeypatch):
    def check(fused_forwards, **changes):
        torch.manual_seed(0)
        config = AutoConfig.for_model("granite", **SIZES, **changes)
        network = wrap_model(AutoModelForCausalLM.from_config(config), "sdpa")
        if fused_forwards:
            apply_fused_forwards(network.base_model)
            network = prune_last_layer(network)
        check_parity(network, "cpu", nullcontext(), True, fused_forwards)

    monkeypatch.setitem(FUSED_FAMILIES, "granite", "Granite")
    check(True)
    check(False, residual_multiplier=0.3)
    with pytest.raises(UserError, match=r"of target tokens differ .*; try advanced.fused_forwards=off"):
        check(True, residual_multiplier=0.3)


def test_a_batch_without_targets_has_zero_gradients():
    _, (network, batcher) = _both("llama")
    loss, gradients = _gradients(network, batcher, without_targets(_batch(PACKED, 0.3)))
    assert float(loss) == 0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_only_targets_pass_through_the_last_mlp_and_no_padding_through_any():
    _, (network, batcher) = _both("llama")
    batch, seen = _batch(PACKED, 0.3), list[int]()
    for layer in network.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0][..., 0].numel()))
    Supervised().loss_sum(network, batcher.to_device(batch))
    assert seen == [batch.real_tokens, batch.targets]


def test_full_rows_of_one_document_need_no_buckets():
    batcher = Batcher(8, WIDTH, 0, "cpu", unpad=True)
    assert batcher.to_device(_batch([[48], [48]], 0.5)).layout.length_buckets is None
    assert batcher.to_device(_batch(PACKED, 0.5)).layout.length_buckets is not None


@pytest.mark.parametrize("lengths", [[[3, 33, 32, 1]], [[48], [48], [20]], [[1]], [[64, 5], [70]]])
def test_every_token_is_once_beside_its_neighbours_in_a_bucket(lengths):
    sizes = [size for row in lengths for size in row]
    documents = np.repeat(np.arange(len(sizes)), sizes)
    buckets = make_length_buckets(documents)
    x = torch.arange(len(documents)).view(1, -1, 1, 1).expand(-1, -1, 2, 3)
    rows = [row[:, 0, 0] for part in buckets.split(x) for row in part]
    for document in range(len(sizes)):
        tokens = torch.from_numpy(np.flatnonzero(documents == document))
        assert any(torch.equal(row[: len(tokens)], tokens) for row in rows)
    assert torch.equal(buckets.join(buckets.split(x)), x)
    assert sum(count * longest for count, longest in buckets.shapes) <= 2 * len(documents) + 32 * len(sizes)


@pytest.mark.parametrize(
    ("extra", "pruned"), [([], True), (["train.compile=on"], False), (["advanced.fused_forwards=off"], False)]
)
def test_it_is_for_fused_layers_that_are_not_compiled(words, home, extra, pruned):
    from sojourn.data.prepare import prepare
    from sojourn.train.build import bare_network
    from sojourn.train.resolve import resolve_here

    config = resolve_here(load_run([*words, "train.device=cpu", *extra]).config).config
    network = bare_network(config, prepare(config.data, home / "prepared"), "cpu")
    assert network.last_layer_pruned is pruned


def test_the_measurement_against_plain_transformers_runs(words, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import foundation

    found = foundation.train_speed(words, rounds=1, steps=1)
    assert found["ratio"] > 0 and set(found["tokens_per_second"]) == {"sojourn", "transformers"}
