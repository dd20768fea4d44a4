"""Every `auto` is decided once: a plan for a GPU, and a run on a machine with this GPU, come to the same settings."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sojourn.catalog.gpus import find_gpu, gpus
from sojourn.catalog.models import find_model
from sojourn.config.load import load_run
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.machine import precision
from sojourn.model import attention
from sojourn.plan.offers import plan_device, resolve_for
from sojourn.resolve.device_spec import catalog_device
from sojourn.resolve.model_spec import model_spec_of
from sojourn.train import local_device
from sojourn.train.resolve import resolve_here

DRAWS = 120
CARDS = [card for card in gpus() if card.capability is not None and card.capability >= (7, 0)]
BASES = ("qwen2.5-0.5b", "qwen3-1.7b", "llama-3.2-1b", "gemma-2-2b", "mistral-7b-v0.3")
EXTRA = {"gemma2": {"attn_logit_softcapping": 50.0, "sliding_window": 4096}, "mistral": {"sliding_window": None}}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this machine look like one with so much of a card, freshly rented."""
    monkeypatch.setenv("SOJOURN_HOME", str(tmp_path / "home"))

    def describe(card, config, ranks):
        rented = catalog_device(config, card, ranks)
        properties = SimpleNamespace(name=card.name, total_memory=int(card.memory_gib * 2**30))
        answers = {"get_device_name": card.name, "get_device_capability": card.capability, "current_device": 0,
                   "mem_get_info": (rented.free_bytes, rented.free_bytes), "get_device_properties": properties,
                   }  # fmt: skip
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *given, answer=answer: answer)
        monkeypatch.setattr(precision, "_torch_built_for", list)
        monkeypatch.setattr(local_device, "choose_device", lambda given: "cuda")
        monkeypatch.setattr(local_device, "importable", rented.packages.__contains__)
        monkeypatch.setattr(local_device, "_torch_version", lambda: rented.torch_version)
        monkeypatch.setattr(attention, "smoke_test", lambda *given: True)

    return describe


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders with a config.json, as the publishers write them."""
    folder = tmp_path_factory.mktemp("bases")
    for name in BASES:
        spec = find_model(name)
        settings = {
            "model_type": spec.family, "hidden_size": spec.hidden, "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads, "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim,
            "intermediate_size": spec.ffn, "vocab_size": spec.vocab, "tie_word_embeddings": spec.tied,
            "max_position_embeddings": spec.positions, **EXTRA.get(spec.family, {}),
        }  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    return folder


def _drawn(draw, bases):
    """A configuration as typed: what is not drawn is left to `auto`."""
    choices = {
        "train.steps": (10, 100, 1000, 20_000), "train.global_batch": (8, 9, 16, 21, 48, 256),
        "data.max_length": (512, 1024, 2048, 4096), "data.packing": ("packed", "packed", "off"),
        "train.micro_batch": ("auto", "auto", "auto", 1, 2),
        "train.activation_checkpointing": ("auto", "auto", "off", "full"),
        "train.optimizer": ("adamw", "adamw", "adamw_8bit", "muon"), "train.deterministic": ("off", "off", "on"),
        "train.precision": ("auto", "auto", "auto", "fp16", "fp32"), "train.compile": ("auto", "auto", "on", "off"),
        "train.attention": ("auto", "auto", "auto", "varlen", "sdpa"), "train.cuda_graphs": ("auto", "auto", "on"),
        "train.fp8": ("off", "off", "off", "on"), "train.offload": ("off", "off", "off", "optimizer", "all"),
        "train.master_weights": ("fp32", "fp32", "fp32", "bf16", "bf16_kahan"), "train.clip": (0, 1.0),
        "train.optimizer_in_backward": ("off", "off", "off", "on"),
    }  # fmt: skip
    method = draw.choice(("pretrain", "full", "lora", "qlora"))
    settings = {key: draw.choice(values) for key, values in choices.items()}
    words = ["medium", f"model.params={draw.choice(('20M', '110M', '900M', '7B'))}"]
    if method != "pretrain":
        words = ["lora-20k", f"model.base={bases / draw.choice(BASES)}", f"method.kind={method}"]
        words += [f"method.dropout={draw.choice((0.0, 0.05))}"] if method != "full" else []
    return [*words, *(f"{key}={value}" for key, value in settings.items())]


def _outcome(resolve):
    try:
        found = resolve()
    except UserError as error:
        return str(error)
    named = replace(found.workload.model, name="", source="", note="", hub="", also=(), date="", published=None)
    return found.config.model_dump(), replace(found.workload, model=named), found.fits


def test_plan_and_run_decide_alike(machine, bases):
    draw, resolved = random.Random(0), 0
    for number in range(DRAWS):
        words, card, ranks = _drawn(draw, bases), draw.choice(CARDS), draw.choice((1, 1, 2, 8))
        try:
            config = load_run(words).config
        except UserError:  # settings that exclude each other
            continue
        machine(card, config, ranks)
        planned = _outcome(lambda: resolve_for(config, model_spec_of(config), plan_device(config, card, ranks)))  # noqa: B023
        run = _outcome(lambda: resolve_here(config, ranks=ranks))  # noqa: B023
        assert planned == run, (number, card.name, ranks, words)
        if not isinstance(run, str):
            resolved += 1
            RunConfig.model_validate(run[0])  # as ranks above 0 and a resumed run read it
    assert resolved > DRAWS / 4


def test_a_long_context_run_that_compiles_is_planned_compiled(machine, bases):
    """Attention's operations count towards the length of the run: 6·N alone would leave it uncompiled."""
    words = ["lora-20k", f"model.base={bases / 'qwen2.5-0.5b'}", "data.max_length=8192", "train.steps=100"]
    config, card = load_run([*words, "train.global_batch=8"]).config, find_gpu("RTX 4090")
    machine(card, config, 1)
    run, plan = resolve_here(config), resolve_for(config, model_spec_of(config), plan_device(config, card))
    assert run.config.train.compile == plan.config.train.compile == "on" and run.workload.compiled
    named = load_run([*words[:1], "model.base=qwen2.5-0.5b", *words[2:], "train.global_batch=8"]).config
    assert resolve_for(named, model_spec_of(named), plan_device(named, card)).workload.compiled
