"""NEFTune and LoRA+ against plain transformers, peft and torch; in any micro batch, and after a resume."""

import math

import numpy as np
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from sojourn.data.artefact import Batch, read_batch
from sojourn.data.order import splitmix64, step_rows
from sojourn.errors import Stopped, UserError
from sojourn.model.neftune import EmbeddingNoise, token_keys
from sojourn.train.batcher import Batcher
from test_methods import _artefact, _documents, _losses, _plain, _with_peft
from tiny import LORA, losses, run_train, same_weights, stop_after

STEPS = 4
NEFTUNE = "train.neftune_noise_alpha=5"
LORAPLUS = (*LORA, "method.loraplus_lr_ratio=16")
SHORT = (f"train.steps={STEPS}", "train.lr=1e-3", "train.weight_decay=0")


def uniform(seed: int, step: int, row: int, place: int, size: int) -> list[float]:
    """The noise of one token before scaling, in Python's own integers."""

    def hashed(number: int, key: int) -> int:
        return int(splitmix64(np.array([number % 2**64], np.uint64), key)[0])

    step_key = hashed(step, seed)
    token = hashed(hashed(row, step_key) + place, step_key) % 2**32
    found = []
    for dimension in range(size):
        x = (token + dimension * 0x9E3779B9) % 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        x ^= x >> 16
        found.append((x - 2**32 if x >= 2**31 else x) / 2**31)
    return found


def noisy_reference(model, run, alpha: float) -> list[float]:
    """Each document by itself, with noise of alpha / √(L·d) on its embeddings, where L is its own length."""
    artefact, optimizer = _artefact(run), torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    rates, found = [line["lr"] for line in run.read_metrics() if line["kind"] == "train"], []
    embed, size = model.get_input_embeddings(), model.config.hidden_size
    for step in range(STEPS):
        rows = step_rows(step, len(artefact.train), 8, 0)
        batch = read_batch(artefact.train, rows, 64, artefact.pad_id)
        places = [
            (int(rows[i]), int(place[0]))
            for i in range(8)
            for number in range(batch.documents[i].max() + 1)
            if len(place := np.flatnonzero(batch.documents[i] == number))
        ]
        documents, total = list(_documents(artefact, step)), 0.0
        targets = sum(int((labels >= 0).sum()) for _, labels in documents)
        for (row, start), (ids, labels) in zip(places, documents, strict=True):
            length = ids.shape[1]
            noise = torch.tensor([uniform(0, step, row, start + at, size) for at in range(length)])
            embeddings = embed(ids) + noise * alpha / math.sqrt(length * size)
            loss = model(inputs_embeds=embeddings, labels=labels, num_items_in_batch=targets).loss
            loss.backward()
            total += float(loss.detach())
        optimizer.param_groups[0]["lr"] = rates[step]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def test_neftune_equals_plain_transformers_with_noise_on_its_embeddings(tiny):
    run = run_train(tiny.words("method.kind=full", *SHORT, NEFTUNE))
    assert _losses(run) == pytest.approx(noisy_reference(_plain(tiny.base), run, 5.0), rel=1e-5)
    quiet = tiny.whole("method.kind=full", *SHORT)
    assert max(abs(a - b) for a, b in zip(losses(run), losses(quiet), strict=True)) > 1e-3


def test_the_noise_is_uniform_and_as_large_as_the_paper_says(tiny):
    width, size = 512, 256
    documents = np.full((2, width), -1, np.int32)
    documents[0, :100], documents[0, 100:400], documents[1] = 0, 1, 0
    keys = token_keys(np.array([3, 7]), width, 0, 1)
    empty = np.zeros((2, width), np.int64)
    noise = Batcher(2, width, 0, "cpu", neftune_alpha=5.0).to_device(Batch(empty, empty, empty, documents, keys)).noise
    assert isinstance(noise, EmbeddingNoise)
    drawn = noise.add_to(torch.zeros(2, width, size))
    for places, length in ((drawn[0, :100], 100), (drawn[0, 100:400], 300), (drawn[1], 512)):
        most = 5.0 / math.sqrt(length * size)
        assert 0.99 * most < places.abs().max() <= most * 1.0001
        assert abs(float(places.mean())) < 0.02 * most and abs(float(places.std()) / most - 3**-0.5) < 0.01
        same = torch.corrcoef(torch.stack([places[0], places[1], places[-1]]))
        assert (same - torch.eye(3)).abs().max() < 0.25
    assert not drawn[0, 400:].any()
    other = (token_keys(np.array([row]), width, seed, step) for seed, step, row in ((0, 1, 4), (0, 2, 3), (1, 1, 3)))
    assert all((found != keys[0]).mean() > 0.99 for found in other)


@pytest.mark.parametrize(
    "change",
    [
        "train.micro_batch=1",
        "advanced.fused_forwards=off",
        "train.activation_checkpointing=full",
        "train.precision=bf16",
    ],
)
def test_how_it_is_computed_does_not_change_the_noise(tiny, change):
    extra = (*LORA, "train.steps=3", "train.neftune_noise_alpha=50")
    close = {"rel": 0.02} if "bf16" in change else {"rel": 1e-5}
    assert losses(run_train(tiny.words(*extra, change))) == pytest.approx(losses(tiny.whole(*extra)), **close)


def test_neftune_leaves_the_held_out_loss_alone(tiny):
    """The same weights, since nothing is learned: evaluated without noise."""
    still = ("method.kind=full", "train.steps=1", "train.lr=1e-30", "train.weight_decay=0")
    runs = [tiny.whole(*still), run_train(tiny.words(*still, "train.neftune_noise_alpha=100"))]
    evals = [[line["loss"] for line in run.read_metrics() if line["kind"] == "eval"] for run in runs]
    assert evals[0] == evals[1] != [] and losses(runs[0]) != losses(runs[1])


@pytest.mark.parametrize("extra", [("method.kind=full", NEFTUNE), LORAPLUS], ids=["neftune", "loraplus"])
def test_a_run_that_was_stopped_ends_with_the_same_weights(tiny, monkeypatch, extra):
    words = tiny.words(*extra, "save.every_steps=4")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(patch, 6)
        run_train(words)
    assert same_weights(run_train(words), tiny.whole(*extra))


def test_another_ratio_or_noise_is_another_run(tiny):
    words = tiny.words(*LORA, *SHORT)
    run_train(words)
    for setting in ("method.loraplus_lr_ratio=4", NEFTUNE):
        with pytest.raises(UserError, match="was started with other settings"):
            run_train([*words, setting])


def test_lora_plus_equals_plain_pefts(tiny):
    run = run_train(tiny.words(*LORAPLUS, *SHORT))
    model, artefact = _with_peft(_plain(tiny.base)), _artefact(run)
    optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16, betas=(0.9, 0.95), loraplus_weight_decay=0.0
    )
    ratios = [group["lr"] for group in optimizer.param_groups]
    assert {group["lr"] for group in optimizer.param_groups if group["params"]} == {1.0, 16.0}
    rates = [line["lr"] for line in run.read_metrics() if line["kind"] == "train"]
    model.train()
    theirs = []
    for step in range(STEPS):
        documents = list(_documents(artefact, step))
        targets = sum(int((labels >= 0).sum()) for _, labels in documents)
        found = [model(input_ids=i, labels=t, num_items_in_batch=targets).loss for i, t in documents]
        sum(found).backward()
        for group, ratio in zip(optimizer.param_groups, ratios, strict=True):
            group["lr"] = rates[step] * ratio
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(sum(found).detach()))
    assert _losses(run) == pytest.approx(theirs, rel=1e-5)
    assert max(abs(a - b) for a, b in zip(theirs, losses(tiny.whole(*LORA, *SHORT)), strict=True)) > 1e-4


@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
def test_lora_plus_is_honoured_by_every_optimizer(tiny, optimizer):
    extra = (*LORA, "train.steps=3", f"train.optimizer={optimizer}")
    assert losses(run_train(tiny.words(*extra, "method.loraplus_lr_ratio=16"))) != losses(tiny.whole(*extra))


def test_lora_plus_belongs_to_adapters(tiny):
    with pytest.raises(UserError, match=r"loraplus_lr_ratio: belongs to lora and qlora"):
        run_train(tiny.words("method.kind=full", "method.loraplus_lr_ratio=4"))
