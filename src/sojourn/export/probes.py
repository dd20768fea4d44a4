"""Probes: the chats and texts that the parity gate replays. A run stores some; these here are for every model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.infer.runtimes.base import Messages, Tools

PROBES_FILE = "probes.json"


@dataclass(frozen=True)
class Probe:
    """A chat, or, where `messages` is None, a plain text. `text` and `ids` of a chat: as training had it, where a run
    stored them. `generates`: its greedy continuation is compared."""

    messages: Messages | None = None
    tools: Tools | None = None
    text: str | None = None
    ids: list[int] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    generates: bool = False


def stored_probes(found: Any) -> list[Probe]:
    """From a run's `probes.json`: each chat as it was trained on, and up to where an answer begins."""
    probes = []
    for one in found if isinstance(found, list) else []:
        messages, text, ids = (one.get(key) if isinstance(one, dict) else None for key in ("messages", "text", "ids"))
        if not (_is_chat(messages) and isinstance(text, str) and _is_ids(ids)):
            continue
        probes.append(Probe(messages, text=text, ids=ids, add_generation_prompt=False))
        probes.append(Probe(messages, generates=True))
    return probes


def builtin_probes() -> list[Probe]:
    return [*_CHATS, *(Probe(text=text, add_special_tokens=True) for text in _TEXTS)]


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    ],
}
_RESULT = {"role": "tool", "content": '{"sky": "clear"}', "tool_call_id": "call00001", "name": "get_weather"}
_CHATS = (
    Probe([_user("What is the capital of France?")], generates=True),
    Probe([_system("You are a patient teacher. Be brief."), _user("Why is the sky blue?")], generates=True),
    Probe([_user("你好！"), _assistant("你好，有什么可以帮你？"), _user("请用一句话介绍北京。")], generates=True),
    Probe([_user("Fix this:\n\n```python\ndef add(a, b):\n\tif a == None:\n        return b\n    return a-b\n```")],
          generates=True),
    Probe([_user("Add 3.14159, 1234567890 and 0x1F; what is 2^10 % 7? Write 1,000,000 in words.")]),
    Probe([_user("👩‍👩‍👧‍👦 🇫🇷 🙂 café naïve ﬁ ½ ①")]),
    Probe([_user("  two  spaces,\ttab,\n\n\nthree lines,\r\n a no-break\u00a0space   ")]),
    Probe([_user("A colour?"), _assistant("Blue."), _user("More?"), _assistant("Red.")], add_generation_prompt=False),
    Probe([_user("What is the weather in Rome?")], [_WEATHER]),
    Probe([_user("What is the weather in Rome?"), _CALL, _RESULT], [_WEATHER]),
)  # fmt: skip
_TEXTS = (  # in Unicode's composed form (NFC): llama.cpp has no normalizer
    "Once upon a time, there was a lighthouse keeper who'd never seen the sea.",
    "I'LL say it's 12345678901 or 3.5e-10, won't you? 'tis, they've, WE'RE, Œuvre, Straße, DZENAN",
    "width:  12, height:   345,\t67\n  8  apples\n\n   9 pears",
    "def f() -> None:\n    for i in range(10):\n\t\tprint(f'{i:>4}')  # x\n\n\n\nif __name__ == '__main__':\n    f()\n",
    "北京大学的学生们在2024年3月15日写了一封信。日本語のテキスト、한국어 문장입니다。",
    "Привет, мир! Ελληνικά مرحبا بالعالم १२३ ١٢٣ สวัสดี",
    " leading space, trailing spaces   \n \n\t\t tabs\x0bvertical  \u200bzero-width 🤷🏽‍♀️🏳️‍🌈",
)
