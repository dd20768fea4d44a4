"""A Jinja chat template as plain turns: the texts around each role's content. For programs that do not run Jinja."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn.data.tokenize.render_chat import render_template

_MARK = "\ue000"  # a private character, which no template writes
_PROBE = ("system", "user", "assistant", "user", "assistant", "user")
_OTHERS = (("user",), ("user", "assistant", "user"), ("system", "user"), _PROBE)

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Turns:
    """`around`: what stands before and after the content of each role. `begin`: before everything. `ask`: after
    everything, for the assistant to go on. `system`: the message that the template adds to a chat without one."""

    around: dict[str, tuple[str, str]]
    begin: str
    ask: str
    system: str | None = None

    def render(self, chat: Chat) -> str:
        if self.system is not None and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": self.system}, *chat]
        return self.begin + "".join(m["content"].join(self.around[m["role"]]) for m in chat) + self.ask


def find_turns(template: str, names: dict[str, str], bos: str = "") -> Turns | None:
    """`names`: bos_token, eos_token, … `bos`: what a chat begins with before its first turn. None where the text
    depends on more than roles and contents."""
    try:
        turns = _find(template, names, bos)
        for roles in _OTHERS if turns is not None else ():
            chat = [{"role": role, "content": f"text {number}"} for number, role in enumerate(roles)]
            if turns is None or turns.render(chat) != render_template(template, names, chat, None, True):
                return None
    except Exception:  # a template may raise anything
        return None
    return turns


def _find(template: str, names: dict[str, str], bos: str) -> Turns | None:
    """What stands before, between and after the contents of a probe chat, cut at the ends of turns."""
    asked, silent = (_texts_between(template, names, _PROBE, ask) for ask in (True, False))
    plain = _texts_between(template, names, _PROBE[1:], True)
    if asked is None or silent is None or plain is None or not asked[6].startswith(silent[6]):
        return None
    user_end, ask = silent[6], asked[6].removeprefix(silent[6])
    if not asked[2].startswith(user_end):
        return None
    bos = bos if asked[0].startswith(bos) and plain[0].startswith(bos) else ""
    asked[0], plain[0] = asked[0].removeprefix(bos), plain[0].removeprefix(bos)
    user_open = _user_open(asked, plain, user_end)
    system_end, assistant_end = asked[1].removesuffix(user_open), asked[3].removesuffix(user_open)
    around = {"user": (user_open, user_end), "assistant": (asked[2].removeprefix(user_end), assistant_end)}
    begin = plain[0].removesuffix(user_open)
    if asked[0].startswith(begin):
        return Turns({**around, "system": (asked[0].removeprefix(begin), system_end)}, bos + begin, ask)
    default = begin.removeprefix(asked[0]).removesuffix(system_end)
    if begin.startswith(asked[0]) and default:  # a system message of its own
        return Turns({**around, "system": (asked[0], system_end)}, bos, ask, default)
    return None


def _user_open(asked: list[str], plain: list[str], user_end: str) -> str:
    """The end of what stands before a user's content after the assistant, after the system and at the beginning. Where
    all turns end alike, it begins after that end."""
    if user_end and asked[3].startswith(user_end):
        return asked[3].removeprefix(user_end)
    texts = (asked[1], asked[3], plain[0])
    return next(texts[0][at:] for at in range(len(texts[0]) + 1) if all(one.endswith(texts[0][at:]) for one in texts))


def _texts_between(template: str, names: dict[str, str], roles: tuple[str, ...], ask: bool) -> list[str] | None:
    chat = [{"role": role, "content": f"{_MARK}{number}{_MARK}"} for number, role in enumerate(roles)]
    rest = render_template(template, names, chat, None, ask)
    texts: list[str] = []
    for turn in chat:
        text, mark, rest = rest.partition(turn["content"])
        if not mark:
            return None
        texts.append(text)
    return [*texts, rest]
