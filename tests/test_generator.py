"""Generation: what transformers' own gives, whatever shares the batch, by the builtin engine and without it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.data.sources.document import Message
from sojourn.errors import RunFailed
from sojourn.infer.engine.engine import DecodeLoop
from sojourn.infer.engine.request import Request
from sojourn.infer.generate import Completion, Generator, Prompt, find_stop_ids
from sojourn.infer.load import LoadedModel, load_model
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams, row_key
from sojourn.infer.transformers_forward import PagedForward, SerialForward, open_transformers_loop

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 100,
}  # fmt: skip
PAGED = {
    "llama": {},
    "gemma3_text": WINDOWS,
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "mistral": {"sliding_window": 10},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"rope_parameters": LONGROPE},
}
SERIAL = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_local_experts": 2, "attention_chunk_size": 16},
}


def make_model(family: str = "llama") -> Any:
    torch.manual_seed(3)
    given = {**SIZES, **{**PAGED, **SERIAL}[family]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)  # larger differences between logits
    return model


def make_prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def run(loop: DecodeLoop, prompts: list[list[int]], params: SamplingParams, at: int = 0) -> list[list[int]]:
    requests = [Request("", ids, params, row_key(7, at + index), 9) for index, ids in enumerate(prompts)]
    for request in requests:
        loop.add(request)
    while loop.has_work:
        loop.step()
    return [request.tokens for request in requests]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one in ("gpt2", "gemma2", "lfm2") else pytest.mark.slow)
        for one in (*PAGED, *SERIAL)
    ],
)
def test_any_model_of_transformers_generates_in_the_loop_what_it_does_alone(family: str) -> None:
    model, prompts, expected = make_model(family), make_prompts(4), []
    for ids in prompts:
        found = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0)
        expected.append(found[0, len(ids) :].tolist())
    loop = open_transformers_loop(model, 3, 256, 1 << 24)
    assert isinstance(loop._forward, PagedForward if family in PAGED else SerialForward)
    assert run(loop, prompts, SamplingParams()) == expected
    assert run(loop, prompts[::-1], SamplingParams()) == expected[::-1]  # from the prefix cache


def test_texts_whose_length_decides_rope_are_not_computed_with_others() -> None:
    """One of them grows beyond the length up to which its frequencies are the same."""
    model = make_model("phi3")
    loop, prompts = open_transformers_loop(model, 3, 256, 1 << 24), [*make_prompts(3), list(range(95))]
    together = run(loop, prompts, SamplingParams())
    assert together == [run(loop, [ids], SamplingParams())[0] for ids in prompts]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=9, repetition_penalty=1.2),
        SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01, frequency_penalty=0.3, presence_penalty=0.1),
    ],
)
def test_sampled_tokens_depend_on_seed_and_index_alone(params: SamplingParams) -> None:
    loop, prompts = open_transformers_loop(make_model(), 5, 256, 1 << 24), make_prompts(5)
    together = run(loop, prompts, params)
    assert together == [run(loop, [ids], params, at)[0] for at, ids in enumerate(prompts)]
    assert together == [*run(loop, prompts[:2], params), *run(loop, prompts[2:], params, 2)]
    assert together != run(loop, prompts, params, at=100)


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(tiny.base), "cpu")


@pytest.fixture(scope="module")
def generator(tiny) -> Generator:
    return Generator(load_model(str(tiny.base), "cpu"), 9)


def test_prompts_are_encoded_as_in_training(loaded: LoadedModel, tiny) -> None:
    from sojourn.data.artefact import Artefact

    encoder = PromptEncoder(loaded.tokenizer)
    split = Artefact(next(path for path in (tiny.home / "prepared").iterdir() if (path / "train").is_dir())).train
    ids, mask, starts = split.row(0)
    trained = int(mask.argmax())
    question = loaded.tokenizer.decode(ids[: starts[1]], skip_special_tokens=True)
    asked = question.split("user\n")[1].split("\n")[0]
    assert encoder.prompt(asked) == ids[:trained].tolist()
    first = [Message("user", asked), Message("assistant", "\nIt is\n\n red."), Message("user", "And now?")]
    earlier = encoder.chat(first[:1])
    assert encoder.chat(first)[: len(earlier)] == earlier
    special = loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encoder.prompt("a <|im_end|> b").count(special) == encoder.prompt("a b").count(special) == 1
    assert special in encoder.prompt("a <|im_end|> b", raw=True)


def colours(generator: Generator) -> list[Prompt]:
    encoder = PromptEncoder(generator.loaded.tokenizer)
    return [
        Prompt(encoder.prompt(f"What colour is the {name}?"), at) for at, name in enumerate(("cat", "boat", "lamp"))
    ]


def test_the_engine_and_transformers_give_the_same_text(generator: Generator, loaded: LoadedModel, monkeypatch) -> None:
    monkeypatch.setattr("sojourn.infer.open_engine.unsupported_reason", lambda loaded: "a test")
    other = Generator(loaded)
    assert isinstance(other._engine._forward, PagedForward)
    for params in (SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=3)):
        assert list(generator(colours(generator), params)) == list(other(colours(generator), params))


def test_stop_strings_end_the_text_and_special_tokens_may_be_named(generator: Generator) -> None:
    prompts, params = colours(generator), {"max_tokens": 30, "temperature": 1.0, "seed": 3}

    def generate(**given: Any) -> list[Completion]:
        return list(generator(prompts, SamplingParams(**params, **given)))

    whole = generate()
    stop = whole[0].text[5:8]
    cut = generate(stop=(stop,))
    for one, other in zip(whole, cut, strict=True):
        assert other.text == one.text.split(stop)[0]
        assert other.finish_reason == ("stop" if stop in one.text else one.finish_reason)
    assert cut[0].tokens < whole[0].tokens and cut[0].text == whole[0].text[:5]
    (stop_id,) = find_stop_ids(generator.loaded.model, generator.loaded.tokenizer)
    assert generate(stop=(generator.loaded.tokenizer.decode([stop_id]),)) == whole


def test_completions_come_in_order_and_prompts_are_taken_as_there_is_room(generator: Generator) -> None:
    taken = []

    def prompts(lengths: list[int]):
        for at, length in enumerate(lengths):
            taken.append(at)
            yield Prompt([5 + at % 50] * length, at)

    made = []
    for completion in generator(prompts([3, 60, 2] * 30), SamplingParams(max_tokens=4)):
        made.append(completion.prompt_tokens)
        assert len(taken) <= len(made) + 4 * generator.batch_size
    assert made == [3, 60, 2] * 30


def test_memory_that_runs_out_halves_the_batch_and_changes_nothing(
    tiny, generator: Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [Prompt(ids, at) for at, ids in enumerate(make_prompts(9))]
    params = SamplingParams(max_tokens=6, stop=("zz",))
    whole, scarce = list(generator(prompts, params)), Generator(load_model(str(tiny.base), "cpu"))
    real, most = scarce._engine.step, 2

    def step() -> Any:
        outputs = real()
        if len(scarce._engine.scheduler.running) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return outputs

    monkeypatch.setattr(scarce._engine, "step", step)
    assert list(scarce(prompts, params)) == whole and scarce.batch_size == 2
    assert [line.split()[-5] for line in capsys.readouterr().err.splitlines()] == ["4", "2"]
    most = 0
    with pytest.raises(RunFailed, match="memory ran out with a single prompt of"):
        list(scarce(prompts, params))


def test_weights_that_are_no_numbers_are_one_line(tiny) -> None:
    broken = load_model(str(tiny.base), "cpu")
    broken.model.get_output_embeddings().weight.data[5] = float("nan")
    with pytest.raises(RunFailed, match=r"not finite numbers.*: sojourn eval MODEL"):
        list(Generator(broken)(colours(Generator(load_model(str(tiny.base), "cpu"))), SamplingParams()))
