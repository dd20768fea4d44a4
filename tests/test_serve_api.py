"""The API through the official `openai` client: chats, completions, responses, streams, tools, JSON, logprobs."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from serve_engine import Served, ThreadEngine, long_base, serving
from sojourn.infer.generate import Generator, Prompt
from sojourn.infer.load import LoadedModel, load_model
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams

CAT = [{"role": "user", "content": "What colour is the cat?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "get_time"}}
COLOUR = {
    "type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tiny) -> LoadedModel:
    return load_model(str(long_base(tiny.base)), "cpu")


@pytest.fixture(scope="module")
def served(loaded: LoadedModel):
    with serving(ThreadEngine(loaded)) as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served):
    with served.client() as made:
        yield made


def chat(client: Any, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": CAT, "max_tokens": 8, **given})


def refused(client: Any, param: str | None, **given: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **given)
    assert error.value.param == param, error.value.message
    return error.value


def test_a_chat_is_what_generate_gives_greedily_and_by_seed(client: Any, loaded: LoadedModel) -> None:
    generator = Generator(load_model(str(loaded.path), "cpu"))
    prompt = PromptEncoder(loaded.tokenizer).prompt(CAT[0]["content"])
    for sampling in ({"temperature": 0.0}, {"temperature": 1.3, "seed": 7, "top_p": 0.9, "top_k": 50, "min_p": 0.01}):
        params = SamplingParams(max_tokens=8, **sampling)
        expected = next(generator([Prompt(prompt)], params))
        extra = {name: sampling.pop(name) for name in ("top_k", "min_p") if name in sampling}
        found = chat(client, **sampling, extra_body=extra)
        assert found.choices[0].message.content == expected.text
        assert found.choices[0].finish_reason == expected.finish_reason == "length"
        usage = (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens)
        assert usage == (len(prompt), 8, len(prompt) + 8)


def test_a_stream_has_the_text_of_the_whole_answer_and_its_usage(client: Any) -> None:
    given = {"seed": 3, "n": 3, "logprobs": True, "top_logprobs": 2}
    whole = chat(client, **given)
    texts, tokens, ends = ["", "", ""], [[], [], []], {}
    chunks = list(chat(client, **given, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) == 3
    assert tokens == [choice.logprobs.content for choice in whole.choices]
    assert ends == dict.fromkeys(range(3), "length")
    assert not any(chunk.usage for chunk in chat(client, stream=True))


def test_logprobs_are_those_of_the_model(client: Any, loaded: LoadedModel) -> None:
    import torch

    prompt = PromptEncoder(loaded.tokenizer).prompt(CAT[0]["content"])
    found = chat(client, temperature=0, logprobs=True, top_logprobs=3, max_tokens=1).choices[0].logprobs.content[0]
    scores = loaded.model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    best = scores.topk(3)
    assert [top.logprob for top in found.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert found.logprob == found.top_logprobs[0].logprob and bytes(found.bytes).decode(errors="replace") == found.token


def test_stop_strings_end_the_text_before_them(client: Any) -> None:
    whole = chat(client, seed=1, max_tokens=30, logprobs=True).choices[0]
    text = whole.message.content
    stop = next(text[at : at + 2] for at in range(4, len(text)) if text.index(text[at : at + 2]) == at)
    for found in (chat(client, seed=1, max_tokens=30, stop=[stop, "never"], logprobs=True),):
        choice = found.choices[0]
        assert choice.message.content == text[: text.index(stop)] and choice.finish_reason == "stop"
        assert found.usage.completion_tokens < 30
        kept = len(choice.logprobs.content)
        assert choice.logprobs.content == whole.logprobs.content[:kept] and kept < len(whole.logprobs.content)
    streamed = chat(client, seed=1, max_tokens=30, stop=stop, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in streamed) == text[: text.index(stop)]


def test_bias_penalties_and_stop_tokens(client: Any, loaded: LoadedModel) -> None:
    eos = loaded.tokenizer.eos_token_id
    ended = chat(client, logit_bias={str(eos): 100})
    assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == ("", "stop")
    ignored = chat(client, logit_bias={str(eos): 100}, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length" and ignored.usage.completion_tokens == 8
    token = loaded.tokenizer.encode("a", add_special_tokens=False)[0]
    same = chat(client, temperature=0, logit_bias={str(token): 1.5}).choices[0].message.content
    assert same == "aaaaaaaa"
    for penalty in (
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 50.0}},
        {"presence_penalty": 2.0},
    ):
        less = chat(client, temperature=0, logit_bias={str(token): 1.5}, **penalty).choices[0].message.content
        assert less != same, penalty
    stopped = chat(client, temperature=0, logit_bias={str(token): 5}, extra_body={"stop_token_ids": [token]})
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("", "stop")


def test_json_by_constrained_decoding(client: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR, "strict": True}}
    for seed in range(3):
        found = chat(client, response_format=schema, max_tokens=60, seed=seed, temperature=1.5)
        assert json.loads(found.choices[0].message.content)["colour"] in ("red", "green")
        assert found.choices[0].finish_reason == "stop"
    text = "".join(one.choices[0].delta.content or "" for one in chat(client, response_format={"type": "json_object"},
                   max_tokens=60, seed=1, stream=True))  # fmt: skip
    assert text.lstrip().startswith("{")
    text = client.responses.create(model="tiny", input="hi", max_output_tokens=60, temperature=1.5,
                                   text={"format": {"type": "json_schema", "name": "c", "schema": COLOUR}})  # fmt: skip
    assert json.loads(text.output_text)["colour"] in ("red", "green")
    refused(client, "response_format", response_format={"type": "json_schema", "json_schema": {
        "name": "c", "schema": {"type": "nope"}}})  # fmt: skip


def test_tools_that_are_required_are_called(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (named, "required"):
        given = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "max_tokens": 150, "seed": 5, "temperature": 0.4}
        found = chat(client, **given).choices[0]
        assert found.finish_reason in ("tool_calls", "length") and found.message.tool_calls, found
        call = found.message.tool_calls[0]
        assert call.function.name in ("get_weather", "get_time") and call.type == "function" and call.id
        if choice is named:
            assert found.message.content is None and call.function.name == "get_weather"
            assert len(json.loads(call.function.arguments)["city"]) <= 3
            assert found.finish_reason == "tool_calls"
            deltas = [one.choices[0] for one in chat(client, **given, stream=True)]
            calls = [one for delta in deltas for one in delta.delta.tool_calls or ()]
            assert [(one.index, *one.function) for one in calls] == [(0, *call.function)]
            assert deltas[-1].finish_reason == "tool_calls"
    history = [*CAT, {"role": "assistant", "tool_calls": [call.model_dump()]},
               {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]  # fmt: skip
    assert chat(client, messages=history, tools=[WEATHER, CLOCK], max_tokens=3).usage.prompt_tokens > 30
    assert not chat(client, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls
    refused(client, "tool_choice", tools=[CLOCK], tool_choice=named)
    refused(client, "tool_choice", tool_choice="required")


def test_completions_echo_and_several_prompts(client: Any, loaded: LoadedModel) -> None:
    def complete(**given: Any) -> Any:
        return client.completions.create(**{"model": "tiny", "prompt": "What colour", **given})

    assert complete().usage.completion_tokens <= 16
    ids = PromptEncoder(loaded.tokenizer).text("What colour")
    plain = complete(seed=1, max_tokens=4).choices[0].text
    assert complete(prompt=ids, seed=1, max_tokens=4).choices[0].text == plain
    found = complete(prompt=["What colour", "the cat"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3] and found.choices[0].text == plain
    echoed = complete(echo=True, max_tokens=4, seed=1, logprobs=2).choices[0]
    assert echoed.text == "What colour" + plain
    assert echoed.logprobs.token_logprobs[0] is None and len(echoed.logprobs.tokens) == len(ids) + 4
    assert all(value < 0 for value in echoed.logprobs.token_logprobs[1:])
    scored = complete(echo=True, max_tokens=0, logprobs=0).choices[0]
    assert scored.text == "What colour" and scored.logprobs.token_logprobs[1:] == echoed.logprobs.token_logprobs[
        1 : len(ids)]  # fmt: skip
    text = "".join(one.choices[0].text for one in complete(echo=True, max_tokens=4, seed=1, stream=True))
    assert text == "What colour" + plain


def test_responses_and_their_events(client: Any) -> None:
    given = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 6, "temperature": 0.0,
             "input": [{"role": "user", "content": [{"type": "input_text", "text": CAT[0]["content"]}]}]}  # fmt: skip
    whole = client.responses.create(**given)
    messages = [{"role": "system", "content": "Be brief."}, *CAT]
    same = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
    assert whole.output_text == same.choices[0].message.content and whole.status == "incomplete"
    with client.responses.stream(**given) as stream:
        events = list(stream)
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    tool = {"type": "function", **WEATHER["function"]}
    called = client.responses.create(model="tiny", input="hi", tools=[tool], max_output_tokens=90, temperature=0.4,
                                     tool_choice={"type": "function", "name": "get_weather"})  # fmt: skip
    call = called.output[0]
    assert (call.type, call.name) == ("function_call", "get_weather") and "city" in json.loads(call.arguments)
    again = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True),
             {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]  # fmt: skip
    assert client.responses.create(model="tiny", input=again, tools=[tool], max_output_tokens=2).usage.input_tokens > 20


@pytest.mark.parametrize(
    ("param", "given"),
    [
        ("temperature", {"temperature": -1}), ("temperature", {"temperature": "1"}), ("top_p", {"top_p": 0}),
        ("n", {"n": 1000}), ("n", {"n": True}), ("max_tokens", {"max_tokens": -5}), ("stop", {"stop": "x" * 1_000_000}),
        ("max_tokens", {"max_tokens": 1.5}), ("max_tokens", {"max_tokens": 1024}), ("seed", {"seed": 2**63}),
        ("max_tokens", {"max_tokens": 10**30}),
        ("stop", {"stop": [""]}), ("stop", {"stop": ["a"] * 17}), ("logit_bias", {"logit_bias": {"5": 101}}),
        ("logit_bias", {"logit_bias": {"-1": 1}}), ("logit_bias", {"logit_bias": {"99999": 1}}),
        ("top_logprobs", {"top_logprobs": 2}), ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("stream_options", {"stream_options": {"include_usage": True}}), ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "word " * 1500}]}),
        ("messages[0]", {"messages": [{"role": "wizard", "content": "hi"}]}),
        ("messages[0].user.name", {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]}),
        ("messages[0]", {"messages": [{"role": "user", "content": "\ufdd0"}]}),
        ("messages[0]", {"messages": [{"role": "assistant"}]}),
        ("tools", {"tools": [CLOCK, CLOCK]}), ("response_format", {"response_format": {"type": "xml"}}),
        ("response_format", {"tools": [CLOCK], "response_format": {"type": "json_object"}}),
        ("suffix", {"extra_body": {"suffix": "x"}}), ("best_of", {"extra_body": {"best_of": 4}}),
        ("reasoning_effort", {"reasoning_effort": "high"}), ("store", {"store": True}),
        ("wizardry", {"extra_body": {"wizardry": 1}}),
        ("ignore_eos", {"extra_body": {"ignore_eos": True}, "response_format": {"type": "json_object"}}),
    ],
)  # fmt: skip
def test_what_is_wrong_or_not_supported_names_its_parameter(client: Any, param: str, given: dict[str, Any]) -> None:
    error = refused(client, param, **given)
    assert error.type == "invalid_request_error" and 10 < len(error.message) < 500


def test_harmless_values_of_unsupported_parameters_are_accepted(client: Any) -> None:
    extra = {"best_of": None, "suffix": None, "modalities": ["text"], "store": False, "service_tier": "auto"}
    assert chat(client, extra_body=extra, user="me", metadata={"a": "b"}, temperature=None).choices


def test_models_and_unknown_ones(client: Any, served: Served) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    for call in (lambda: chat(client, model="gpt-9"), lambda: client.models.retrieve("gpt/9")):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "model_not_found"
    assert served.get("/v1/nothing").status_code == 404 and "error" in served.get("/v1/nothing").json()
    assert served.get("/v1/chat/completions").status_code == 405
    assert served.post("/v1/embeddings", {}).status_code == 404
