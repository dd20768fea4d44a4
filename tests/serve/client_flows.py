"""The basic flows of a client library against a server: `python client_flows.py langchain|litellm URL MODEL`.

Runs in a Python that has the library, so it imports nothing of ours.
"""

import asyncio
import json
import sys
from typing import Any

QUESTION = "What is the capital of France? Answer in one sentence."
CITY = {
    "title": "City", "description": "A city.", "type": "object", "required": ["capital", "millions"],
    "properties": {"capital": {"type": "string", "maxLength": 20}, "millions": {"type": "integer", "maximum": 99}},
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                       "additionalProperties": False},
    },
}  # fmt: skip


def langchain(url: str, model: str) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_openai import ChatOpenAI, OpenAI

    given: dict[str, Any] = {"base_url": url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**given, max_tokens=24)
    whole = chat.invoke([SystemMessage("You are helpful."), HumanMessage(QUESTION)])
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0, whole
    chain = ChatPromptTemplate.from_messages([("system", "You are helpful."), ("user", "{question}")]) | chat
    answer = (chain | StrOutputParser()).invoke({"question": QUESTION})
    assert answer == whole.content
    chunks = list(chat.stream([("system", "You are helpful."), ("user", QUESTION)], stream_usage=True))
    assert "".join(one.content for one in chunks) == answer and len(chunks) > 3
    assert sum(one.usage_metadata["output_tokens"] for one in chunks if one.usage_metadata) > 0
    assert [one.content for one in chat.batch([QUESTION] * 3)] == [chat.invoke(QUESTION).content] * 3
    assert asyncio.run(chat.ainvoke(QUESTION)).content == chat.invoke(QUESTION).content
    roomy = ChatOpenAI(**given, max_tokens=120)
    for method in ("json_schema", "function_calling"):
        city = roomy.with_structured_output(CITY, method=method).invoke(QUESTION)
        assert set(city) == {"capital", "millions"}, (method, city)
    question = HumanMessage("How is the weather in Paris?")
    called = roomy.bind_tools([WEATHER], tool_choice="get_weather").invoke([question])
    assert isinstance(called.tool_calls[0]["args"]["city"], str), called
    result = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
    assert roomy.bind_tools([WEATHER]).invoke([question, called, result]).content
    assert OpenAI(**given, max_tokens=8).invoke("The capital of France is")


def litellm(url: str, model: str) -> None:
    import litellm as library

    given: dict[str, Any] = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0,
                             "max_tokens": 24, "messages": [{"role": "user", "content": QUESTION}]}  # fmt: skip
    whole = library.completion(**given)
    answer = whole.choices[0].message.content
    assert "Paris" in answer and whole.usage.completion_tokens > 0, whole
    chunks = list(library.completion(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == answer
    assert any(getattr(one, "usage", None) for one in chunks)
    assert asyncio.run(library.acompletion(**given)).choices[0].message.content == answer
    roomy = {**given, "max_tokens": 120}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    found = library.completion(**roomy, response_format=form)
    assert set(json.loads(found.choices[0].message.content)) == {"capital", "millions"}, found
    asked = {**roomy, "messages": [{"role": "user", "content": "How is the weather in Paris?"}], "tools": [WEATHER]}
    named = {"type": "function", "function": {"name": "get_weather"}}
    call = library.completion(**asked, tool_choice=named).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"], call
    text = library.text_completion(model=f"text-completion-openai/{model}", api_base=url, api_key="none",
                                   prompt="The capital of France is", max_tokens=8, temperature=0)  # fmt: skip
    assert text.choices[0].text
    try:
        library.completion(**{**given, "model": "openai/another"})
    except library.NotFoundError:
        return
    raise AssertionError("a model that is not served was answered")


if __name__ == "__main__":
    {"langchain": langchain, "litellm": litellm}[sys.argv[1]](*sys.argv[2:])
