"""The decode loop: what transformers' own gives, whatever shares the batch."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sojourn.data.sources.document import Message
from sojourn.infer import decode as decode_module
from sojourn.infer import generate as generate_module
from sojourn.infer.decode import Row, decode
from sojourn.infer.generate import Generator, Prompt, generate
from sojourn.infer.kv_cache import crop_cache, new_cache
from sojourn.infer.load import LoadedModel, load_model
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams, row_key

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"sliding_window": 10},
    "gpt2": {},
}


def make_model(family: str = "llama") -> torch.nn.Module:
    torch.manual_seed(3)
    sizes = SIZES if family != "gpt2" else {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                            "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **FAMILIES[family]})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)  # larger differences between logits
    return model


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return make_model()


def make_prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def run(model: torch.nn.Module, prompts: list[list[int]], params: SamplingParams, at: int = 0, most: int = 9, stops=()):
    rows = [Row(ids, params, row_key(7, at + index), most) for index, ids in enumerate(prompts)]
    decode(model, rows, frozenset(stops), 0)
    return [row.tokens for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(family: str) -> None:
    model, prompts = make_model(family), make_prompts(4)
    together = run(model, prompts, SamplingParams())
    for ids, ours in zip(prompts, together, strict=True):
        with torch.no_grad():
            theirs = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, pad_token_id=0)
        assert ours == theirs[0, len(ids) :].tolist()
        assert ours == run(model, [ids], SamplingParams())[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=9, repetition_penalty=1.2),
        SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01, frequency_penalty=0.3, presence_penalty=0.1),
    ],
)
def test_sampled_tokens_depend_on_seed_and_index_alone(llama: torch.nn.Module, params: SamplingParams) -> None:
    prompts = make_prompts(5)
    together = run(llama, prompts, params)
    assert together == [run(llama, [ids], params, at)[0] for at, ids in enumerate(prompts)]
    assert together == [*run(llama, prompts[:2], params), *run(llama, prompts[2:], params, 2)]
    assert together != run(llama, prompts, params, at=100)


def test_rows_that_end_early_leave_the_others_as_they_are(llama: torch.nn.Module) -> None:
    prompts, params = make_prompts(8), SamplingParams(temperature=1.0)
    whole = run(llama, prompts, params)
    stops = {tokens[2] for tokens in whole[:5]} | {whole[5][7]}
    ended = run(llama, prompts, params, stops=stops)
    for tokens, cut in zip(whole, ended, strict=True):
        first = next((at for at, token in enumerate(tokens) if token in stops), len(tokens) - 1)
        assert cut == tokens[: first + 1]
    assert len({len(cut) for cut in ended}) > 2


def test_a_row_may_have_fewer_tokens_than_its_neighbours(llama: torch.nn.Module) -> None:
    rows = [Row(ids, SamplingParams(), 0, most) for ids, most in zip(make_prompts(3), (1, 5, 9), strict=True)]
    decode(llama, rows, frozenset(), 0)
    assert [len(row.tokens) for row in rows] == [1, 5, 9] and not any(row.stopped for row in rows)


def test_a_long_prefill_in_parts_is_the_same(llama: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(5, 60)
    whole = run(llama, prompts, SamplingParams())
    monkeypatch.setattr(decode_module, "_PREFILL_TOKENS", 35)
    assert run(llama, prompts, SamplingParams()) == whole


def test_a_cache_is_continued_where_the_prompt_goes_on(llama: torch.nn.Module) -> None:
    cache, ids = new_cache(llama), make_prompts(1, 40)[0] + [5, 6, 7]
    first = Row(ids, SamplingParams(), 0, 6)
    decode(llama, [first], frozenset(), 0, cache)
    assert cache.get_seq_length() == len(ids) + 5
    longer = [*ids, *first.tokens[:3], 11, 12]
    assert crop_cache(cache, len(ids) + 3)
    again = Row(longer, SamplingParams(), 0, 6)
    decode(llama, [again], frozenset(), 0, cache)
    assert again.tokens == run(llama, [longer], SamplingParams(), most=6)[0]
    gemma = make_model("gemma3_text")
    assert not crop_cache(new_cache(gemma), 0)  # a sliding window has forgotten the beginning


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(tiny.base), "cpu")


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


def test_stop_strings_end_the_text_and_special_tokens_may_be_named(loaded: LoadedModel) -> None:
    encoder = PromptEncoder(loaded.tokenizer)
    prompts = [
        Prompt(encoder.prompt(f"What colour is the {name}?"), at) for at, name in enumerate(("cat", "boat", "lamp"))
    ]
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 3}
    whole = generate(loaded, prompts, SamplingParams(**params))
    stop = whole[0].text[5:8]
    cut = generate(loaded, prompts, SamplingParams(**params, stop=(stop,)))
    for one, other in zip(whole, cut, strict=True):
        assert other.text == one.text.split(stop)[0]
        assert other.finish_reason == ("stop" if stop in one.text else one.finish_reason)
    assert cut[0].tokens < whole[0].tokens and cut[0].text == whole[0].text[:5]
    token = loaded.tokenizer.decode(
        [generate_module.find_stop_ids(loaded.model, loaded.tokenizer).__iter__().__next__()]
    )
    assert generate(loaded, prompts, SamplingParams(**params, stop=(token,))) == whole


def test_memory_that_runs_out_halves_the_batch_and_changes_nothing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, real, sizes = [Prompt(ids, at) for at, ids in enumerate(make_prompts(9))], generate_module.decode, []
    whole = generate(loaded, prompts, SamplingParams(max_tokens=6, stop=("zz",)))

    def scarce(model: object, rows: list[Row], *given: object, **named: object) -> None:
        sizes.append(len(rows))
        real(model, rows, *given, **named)
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generate_module, "decode", scarce)
    generator = Generator(loaded, SamplingParams(max_tokens=6, stop=("zz",)))
    assert generator(prompts) == whole and sizes == [9, 4, 2, 2, 2, 2, 1]
    assert "4 prompts at a time" in capsys.readouterr().err and generator.batch_size == 2
