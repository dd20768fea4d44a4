"""The builtin engine: what a request gets does not depend on the requests beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sojourn.estimate.serving import FAMILIES
from sojourn.infer.engine.block_pool import BLOCK
from sojourn.infer.engine.cpu.smoke_test import open_cpu_ops
from sojourn.infer.engine.decoder import Decoder
from sojourn.infer.engine.engine import Engine, EngineOptions
from sojourn.infer.engine.ops_torch import Ops, TorchOps
from sojourn.infer.engine.request import Request
from sojourn.infer.read_decoder import model_unsupported_reason, read_decoder
from sojourn.infer.sampling import SamplingParams, row_key

VOCAB = 200
CONTEXT = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 20},
    "gemma3_text": {
        "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm4": {"head_dim": 16, "attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "llama": {"attention_bias": True},
}  # fmt: skip


def tiny_model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **OTHERS.get(kind, {}))).eval()
    for parameter in model.parameters():  # texts that do not repeat themselves
        parameter.data.uniform_(-0.3, 0.9) if parameter.ndim == 1 else parameter.data.normal_(0, 0.15)
    return model


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return open_cpu_ops() or TorchOps()


@pytest.fixture(scope="module")
def decoder(ops: Ops) -> Decoder:
    return read_decoder(tiny_model("qwen2"), ops.pack, CONTEXT)


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.pool.free == engine.options.blocks - 1
    return [request.tokens for request in requests]


def make(ids: list[int], index: int = 0, most: int = 20, **params: Any) -> Request:
    return Request(str(index), ids, SamplingParams(**params), row_key(7, index), most)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_generates_what_transformers_does(kind: str, ops: Ops) -> None:
    model, asked, expected = tiny_model(kind), prompts(4), []
    assert model_unsupported_reason(model) is None
    for ids in asked:
        found = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        expected.append(found[0, len(ids) :].tolist())
    engine = Engine(read_decoder(model, ops.pack, CONTEXT), ops, EngineOptions(4, 64, CONTEXT, 100))
    assert run(engine, [make(ids, at, 12) for at, ids in enumerate(asked)]) == expected


LOADS = {
    "together": EngineOptions(32, 512, CONTEXT, 400),
    "pieces": EngineOptions(8, 16, CONTEXT, 400),  # prompts in pieces
    "preempted": EngineOptions(8, 40, CONTEXT, 16),  # requests take each other's blocks
    "drafts": EngineOptions(8, 64, CONTEXT, 400, draft_tokens=3),
}


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        pytest.param(
            options, temperature, id=f"{temperature}-{name}",
            marks=pytest.mark.slow if (temperature == 0.0) == (name in ("pieces", "drafts")) else [],
        )
        for name, options in LOADS.items()
        for temperature in (0.0, 1.0)
    ],
)  # fmt: skip
def test_a_request_gets_alone_what_it_gets_under_load(
    options: EngineOptions, temperature: float, decoder: Decoder, ops: Ops
) -> None:
    asked = [*prompts(10), *prompts(3)]  # the last ones begin like the first: prefix cache
    alone = []
    for at, ids in enumerate(asked):
        engine = Engine(decoder, ops, EngineOptions(1, 512, CONTEXT, 40))
        alone += run(engine, [make(ids, at, temperature=temperature)])
    engine = Engine(decoder, ops, options)
    requests = [make(ids, at, temperature=temperature) for at, ids in enumerate(asked)]
    cancelled = make(asked[0], 99, 50)
    waiting, rng = [*requests[:6], cancelled, *requests[6:]], random.Random(1)
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.4:
            engine.add(waiting.pop(0))
        engine.step()
        if len(cancelled.tokens) >= 3 and not cancelled.is_finished:
            engine.cancel(cancelled)
    assert [request.tokens for request in requests] == alone
    assert cancelled.finish_reason == "cancelled" and len(cancelled.tokens) < 50
    assert engine.scheduler.pool.free == options.blocks - 1
    if options.blocks < 40:
        assert engine.scheduler.preemptions > 0


def test_equal_beginnings_are_computed_once(decoder: Decoder, ops: Ops) -> None:
    engine = Engine(decoder, ops, EngineOptions(4, 512, CONTEXT, 100))
    ids = [5 + at % 90 for at in range(100)]
    first, again, other = make(ids), make([*ids, 7]), make([9, *ids])
    expected = run(engine, [first])[0]
    run(engine, [again, other])
    assert (again.cached, other.cached) == (100 // BLOCK * BLOCK, 0)
    repeated = make(ids)
    assert run(engine, [repeated])[0] == expected and repeated.cached == (100 - 1) // BLOCK * BLOCK


def test_blocks_of_other_weights_are_not_found(decoder: Decoder, ops: Ops) -> None:
    engine = Engine(decoder, ops, EngineOptions(4, 512, CONTEXT, 100))
    run(engine, [make(list(range(3, 103)))])
    engine.scheduler.pool.forget_all()
    again = make(list(range(3, 103)))
    run(engine, [again])
    assert again.cached == 0


def test_stop_tokens_end_a_request_and_are_the_last(decoder: Decoder, ops: Ops) -> None:
    engine = Engine(decoder, ops, EngineOptions(4, 512, CONTEXT, 100))
    free = run(engine, [make(prompts(1)[0])])[0]
    stopped = make(prompts(1)[0])
    stopped.stop_ids = frozenset({free[5]})
    run(engine, [stopped])
    assert stopped.tokens == free[: free.index(free[5]) + 1] and stopped.finish_reason == "stop"


def test_penalties_are_those_of_the_decode_loop(decoder: Decoder, ops: Ops) -> None:
    """They change the text, and a request that was preempted counts the tokens from before."""
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    asked = prompts(6, 3)
    wide = run(
        Engine(decoder, ops, EngineOptions(8, 512, CONTEXT, 400)),
        [make(p, i, 30, **params) for i, p in enumerate(asked)],
    )
    tight = Engine(decoder, ops, EngineOptions(8, 512, CONTEXT, 14))
    assert run(tight, [make(p, i, 30, **params) for i, p in enumerate(asked)]) == wide and tight.scheduler.preemptions
    assert wide != run(
        Engine(decoder, ops, EngineOptions(8, 512, CONTEXT, 400)), [make(p, i, 30) for i, p in enumerate(asked)]
    )


def test_log_probabilities_are_the_models(ops: Ops) -> None:
    model, ids = tiny_model("llama"), prompts(1, 5)[0] + [4, 5, 6]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    engine = Engine(read_decoder(model, ops.pack, CONTEXT), ops, EngineOptions(4, 16, CONTEXT, 100))
    request = Request("a", ids, SamplingParams(), 0, 1, logprobs=3, prompt_logprobs=2)
    engine.add(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [one.id for one in request.prompt_scores] == ids[1:]
    found = torch.tensor([one.logprob for one in request.prompt_scores])
    assert torch.allclose(found, expected[torch.arange(len(ids) - 1), ids[1:]], atol=1e-4)
    (token,) = outputs[-1].tokens
    top = expected[-1].topk(3)
    assert [one for one, _ in token.top] == top.indices.tolist() and token.id == int(top.indices[0])
    assert token.logprob == pytest.approx(float(top.values[0]), abs=1e-4)
    assert len(request.prompt_scores[0].top) == 2


def test_adapters_share_a_batch(tmp_path: Path, ops: Ops) -> None:
    """Each request has its own adapter's text, whichever are beside it; unloading takes it away."""
    from peft import LoraConfig, PeftModel, get_peft_model

    folders = {}
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        targets = ["q_proj", "v_proj", "down_proj"] if seed else "all-linear"
        adapted = get_peft_model(tiny_model("qwen2"), LoraConfig(r=4 + seed, lora_alpha=16, target_modules=targets))
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.normal_(0, 0.2)
        adapted.save_pretrained(tmp_path / name)
        folders[name] = tmp_path / name
    asked, expected = prompts(3, 9), {}
    for name, folder in {**folders, None: None}.items():
        model = tiny_model("qwen2")
        model = model if folder is None else PeftModel.from_pretrained(model, folder)
        for at, ids in enumerate(asked):
            found = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=None)
            expected[name, at] = found[0, len(ids) :].tolist()
    engine = Engine(read_decoder(tiny_model("qwen2"), ops.pack, CONTEXT), ops, EngineOptions(8, 64, CONTEXT, 100))
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    requests = {}
    for name, at in expected:
        requests[name, at] = make(asked[at], at, 10)
        requests[name, at].adapter = name
    run(engine, list(requests.values()))
    assert {key: request.tokens for key, request in requests.items()} == expected
    engine.unload_adapter("first")
    second = make(asked[0], 0, 10)
    second.adapter = "second"
    assert run(engine, [second])[0] == expected["second", 0]


def test_an_adapter_of_a_model_whose_heads_are_stored_in_another_order(tmp_path: Path, ops: Ops) -> None:
    from peft import LoraConfig, get_peft_model

    adapted, ids = get_peft_model(tiny_model("glm4"), LoraConfig(r=4, target_modules="all-linear")), prompts(1, 9)[0]
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    adapted.save_pretrained(tmp_path)
    expected = adapted.generate(input_ids=torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    engine = Engine(read_decoder(tiny_model("glm4"), ops.pack, CONTEXT), ops, EngineOptions(8, 64, CONTEXT, 100))
    engine.load_adapter("own", tmp_path)
    request = make(ids, 0, 10)
    request.adapter = "own"
    assert run(engine, [request])[0] == expected[0, len(ids) :].tolist()


def test_a_model_that_the_engine_cannot_compute_is_refused_in_a_line() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=32, n_head=2, vocab_size=50))
    assert "its architecture is gpt2" in str(model_unsupported_reason(gpt2))


def test_no_request_can_have_the_address_of_one_whose_sampler_is_kept() -> None:
    """Python gives the memory of an object that is gone to a later one, which would then draw with its seed."""
    import weakref

    from sojourn.infer.engine.sample import StepSampler
    from sojourn.infer.engine.scheduler import Part

    sampler, logits = StepSampler(torch.device("cpu")), torch.randn(1, 500)
    request = Request("r", [1, 2], SamplingParams(temperature=1.5), 7, 4)
    sampler(logits, [Part(request, 0, 2, True)], torch.zeros(1))
    held = weakref.ref(request)
    del request
    assert held() is not None


def test_the_engine_can_be_read_in_an_evening() -> None:
    from sojourn.infer import engine

    sources = [path for path in Path(engine.__file__).parent.rglob("*") if path.suffix in (".py", ".c", ".h")]
    assert len(sources) > 15 and sum(len(path.read_text().splitlines()) for path in sources) <= 2500
