"""`sojourn serve` as a user starts it, with a real model, through the official client.

Slow; needs SOJOURN_REAL_MODEL: the folder of a chat model, such as SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from serve_engine import Command

MODEL = os.environ.get("SOJOURN_REAL_MODEL", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL, reason="SOJOURN_REAL_MODEL names no model")]
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                       "additionalProperties": False},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def command():
    made = Command(MODEL)
    yield made
    made.process.kill()


@pytest.fixture(scope="module")
def client(command: Command):
    from openai import OpenAI

    return OpenAI(base_url=command.url, api_key="none", max_retries=0, timeout=300)


def test_chat_stream_and_logprobs(client: Any) -> None:
    given = {"model": "real", "messages": FRANCE, "max_tokens": 24, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**given, top_logprobs=2).choices[0]
    assert "Paris" in whole.message.content
    assert "".join(one.token for one in whole.logprobs.content) == whole.message.content
    chunks = client.chat.completions.create(**given, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.message.content


def test_json_schema_and_tools(client: Any) -> None:
    fields = {"capital": {"type": "string", "maxLength": 20}, "millions": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="real", messages=FRANCE, response_format=form, max_tokens=120, temperature=0
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"capital", "millions"}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        messages = [{"role": "user", "content": "How is the weather in Paris?"}]
        answer = client.chat.completions.create(model="real", messages=messages, tools=[WEATHER], tool_choice=choice,
                                                max_tokens=120, temperature=0).choices[0]  # fmt: skip
        call = answer.message.tool_calls[0]
        assert call.function.name == "get_weather" and isinstance(json.loads(call.function.arguments)["city"], str)


def test_the_same_answers_under_load_with_clients_that_leave(client: Any) -> None:
    """Greedy, and sampled with a seed: each request alone, then all at once among others that are cancelled."""
    jobs = [{"model": "real", "messages": [{"role": "user", "content": f"Count from {at} to 9."}], "max_tokens": 12,
             "temperature": at % 2, "seed": at} for at in range(12)]  # fmt: skip
    alone = [client.chat.completions.create(**job).choices[0].message.content for job in jobs]
    together: dict[int, str] = {}

    def ask(at: int) -> None:
        together[at] = client.chat.completions.create(**jobs[at]).choices[0].message.content

    def leave() -> None:
        stream = client.chat.completions.create(**{**jobs[0], "max_tokens": 200}, stream=True)
        next(iter(stream))
        stream.close()

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(12)]
    threads += [threading.Thread(target=leave) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[at] for at in range(12)] == alone


def test_sigterm_drains_and_ends_with_zero(command: Command, client: Any) -> None:
    stream = iter(client.chat.completions.create(model="real", messages=FRANCE, max_tokens=40, stream=True,
                                                 extra_body={"ignore_eos": True}))  # fmt: skip
    next(stream)
    command.process.send_signal(signal.SIGTERM)
    assert len(list(stream)) > 3
    assert command.process.wait(60) == 0
    assert not [line for line in command.lines if "Traceback" in line or "internal_error" in line]
    assert Path(f"/proc/{command.process.pid}").exists() is False
