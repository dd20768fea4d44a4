"""How a conversation becomes text, and which characters of it are the assistant's own.

The template is the truth: its rendering is what plain transformers would render. The assistant's spans come from its
generation marks. Where it has none they are found by laying the contents into the template's skeleton, or by comparing
with the rendering of the turns before; what is found must make up the true rendering to the last character.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from sojourn.data.sources.document import Message
from sojourn.data.sources.formats import BadRecord
from sojourn.data.tokenize.templates import END_OF_TEXT, NAMED, named_template
from sojourn.errors import UserError

Span = tuple[int, int]
Tools = Sequence[dict[str, Any]]
Turns = Sequence[Message]

# Noncharacters: no document has them (formats.py refuses it), so they can mark places in a rendering.
_OPEN, _CLOSE, _CONTENT = "\ufdd0", "\ufdd1", "\ufdd2"
_TOOLS = (
    "# Tools\n\nYou may call these functions, given as JSON within <tools></tools> tags:\n<tools>\n{listed}\n</tools>\n"
    "\nTo call one, write its name and arguments as JSON within <tool_call></tool_call> tags."
)
_PROBE = (Message("user", "Hello"), Message("assistant", "Hello"))
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Template:
    """A chat template, the names of the special tokens it may use, and all tokens that could end a turn."""

    def __init__(self, source: str, names: dict[str, str], added: Iterable[str]) -> None:
        self.source = source
        self._has_marks = bool(_GENERATION.search(source))
        self._names = names
        self._render = _compiled(source)
        ends = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)) or r"(?!)"
        self._end = re.compile(rf"\s*(?:{ends})")
        self._ended = re.compile(rf"(?:{ends})\s*\Z")
        self._is_ours = source in {named_template(name, END_OF_TEXT) for name in NAMED}
        self._skeleton = lru_cache(maxsize=4096)(self._find_skeleton)
        self._ends_inside: bool | None = None
        self._frame = lru_cache(maxsize=4096)(self._find_frame)

    def text(self, messages: Turns, tools: Tools = (), prompt: bool = False) -> str:
        """The rendering, as plain transformers gives it; with `prompt`, up to where the assistant is to speak."""
        if not prompt and self._is_ours:
            return self.spans(messages, tools)[0]
        rendered = self._rendered(*self.adapted(messages, tools), prompt)
        return _without_marks(rendered)[0] if self._has_marks else rendered

    def spans(self, messages: Turns, tools: Tools = (), last: bool = False) -> tuple[str, list[Span]]:
        """The rendering, and the span of each of the assistant's turns (or of the `last`) with its end-of-turn mark."""
        messages, tools = self.adapted(messages, tools)
        if self._is_ours and not tools and all(m.content and not m.tool_calls and m.role != "tool" for m in messages):
            text, spans = self._filled(messages)
            return text, spans[-1:] if last else spans
        rendered = self._rendered(messages, tools)
        if self._has_marks:
            text, spans = _without_marks(rendered)
            if not self._marks_have_ends():
                spans = [(start, self._end_of_turn(text, end)) for start, end in spans]
            return text, spans[-1:] if last else spans
        spans_found = self._by_skeleton(rendered, messages, tools)
        if spans_found is None:
            return rendered, self._one_by_one(rendered, messages, tools, last)
        return rendered, spans_found[-1:] if last else spans_found

    def end_of_turn(self) -> str:
        """The token that ends an assistant's turn."""
        text, spans = self.spans(_PROBE)
        found = self._ended.search(text[: spans[-1][1]]) if spans else None
        if found is None:
            raise UserError(
                "data.template: it marks nothing as the assistant's words; choose another (data.template=chatml)"
            )
        return found.group().strip()

    def adapted(self, messages: Turns, tools: Tools) -> tuple[Turns, Tools]:
        """For a template that knows no tools or no reasoning: the same in words, written as chat.jinja does."""
        if not tools and not any(m.tool_calls or m.reasoning or m.role == "tool" for m in messages):
            return messages, tools
        found = [self._adapted_turn(m) for m in messages]
        if tools and "tools" not in self.source:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            words = _TOOLS.format(listed=listed)
            if found[0].role == "system":
                words, found = f"{found[0].content}\n\n{words}", found[1:]
            found, tools = [Message("system", words), *found], ()
        return found, tools

    def _adapted_turn(self, m: Message) -> Message:
        content, calls, reasoning = m.content, m.tool_calls, m.reasoning
        if reasoning and "reasoning_content" not in self.source:
            content, reasoning = f"<think>\n{reasoning}\n</think>\n\n{content}", ""
        if calls and "tool_calls" not in self.source:
            called = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
            content, calls = "\n".join([content, *called] if content else called), ()
        if m.role == "tool" and not re.search(r"['\"]tool['\"]", self.source):
            return Message("user", f"<tool_response>\n{content}\n</tool_response>")
        return Message(m.role, content, calls, reasoning, m.trained)

    def _rendered(self, messages: Turns, tools: Tools, prompt: bool = False) -> str:
        try:
            return self._render(
                messages=[_as_dict(m) for m in messages], tools=list(tools) or None, documents=None,
                add_generation_prompt=prompt, **self._names,
            )  # fmt: skip
        except Exception as error:  # a template may raise anything; all of it is about this chat and this template
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise BadRecord(f"the chat template refuses it: {why}") from None

    def _marks_have_ends(self) -> bool:
        """Whether what the template marks as generated includes the end-of-turn token."""
        if self._ends_inside is None:
            text, spans = _without_marks(self._rendered(_PROBE, ()))
            self._ends_inside = bool(spans) and self._ended.search(text, *spans[-1]) is not None
        return self._ends_inside

    def _end_of_turn(self, text: str, end: int) -> int:
        """Where the turn whose words end at `end` really ends: behind its end-of-turn token."""
        match = self._end.match(text, end)
        if match is None:
            raise UserError(
                "data.template: no end-of-turn token follows the assistant's words, so the model would never learn to "
                "stop; use another template (data.template=chatml, llama3 or plain)"
            )
        return match.end()

    def _by_skeleton(self, rendered: str, messages: Turns, tools: Tools) -> list[Span] | None:
        """Spans by laying the contents into the skeleton for these roles; None if that does not give the rendering."""
        if tools or any(m.tool_calls or m.reasoning for m in messages):
            return None
        pieces = self._skeleton(tuple(m.role for m in messages))
        if pieces is None:
            return None
        for contents in ([m.content for m in messages], [m.content.strip() for m in messages]):
            parts = [pieces[0], *(part for both in zip(contents, pieces[1:], strict=True) for part in both)]
            if "".join(parts) == rendered:
                break
        else:
            return None
        spans, place = [], 0
        for number, part in enumerate(parts):
            if number % 2 and messages[number // 2].role == "assistant":
                spans.append((place, self._end_of_turn(rendered, place + len(part))))
            place += len(part)
        return spans

    def _filled(self, messages: Turns) -> tuple[str, list[Span]]:
        """What rendering one of our own templates gives, which write every content as it is: only quicker."""
        pieces, ends = self._frame(tuple(m.role for m in messages))
        parts: list[str] = []
        spans: list[Span] = []
        place = 0
        for m, piece, end in zip(messages, pieces, ends, strict=False):
            start = place + len(piece)
            place = start + len(m.content)
            parts += (piece, m.content)
            if end:
                spans.append((start, place + end))
        return "".join([*parts, pieces[-1]]), spans

    def _find_frame(self, roles: tuple[Any, ...]) -> tuple[list[str], list[int]]:
        """The skeleton without marks, and for each turn how many characters behind its content are still trained on."""
        marked = self._skeleton(roles) or []
        ends = [max(0, piece.find(_CLOSE)) for piece in marked[1:]]
        return [piece.replace(_OPEN, "").replace(_CLOSE, "") for piece in marked], ends

    def _find_skeleton(self, roles: tuple[Any, ...]) -> list[str] | None:
        """What the template writes before, between and after the contents of turns with these roles."""
        marks = [f"{_CONTENT}{number}{_CONTENT}" for number in range(len(roles))]
        rest = self._rendered([Message(role, mark) for role, mark in zip(roles, marks, strict=True)], ())
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                return None
            pieces.append(piece)
        return None if any(_CONTENT in piece for piece in (*pieces, rest)) else [*pieces, rest]

    def _one_by_one(self, rendered: str, messages: Turns, tools: Tools, last: bool) -> list[Span]:
        """Spans of turns that are more than their content (tool calls, reasoning), or that the template rewrites."""
        numbers = [number for number, m in enumerate(messages) if m.role == "assistant"]
        spans = []
        for number in numbers[-1:] if last else numbers:
            ways = (self._by_exchange, self._by_prefix)
            found = (way(rendered, messages, tools, number) for way in ways)
            span = next((one for one in found if one and _holds(rendered[slice(*one)], messages[number])), None)
            if span is None:
                raise BadRecord(
                    f"the chat template rewrites message {number + 1} by what follows it, so its words cannot be told "
                    "apart; train on the last answer alone (data.train_on=last)"
                )
            spans.append(span)
        return spans

    def _by_exchange(self, rendered: str, messages: Turns, tools: Tools, number: int) -> Span | None:
        """With a mark in place of the turn's words: what stands around it must begin and end the rendering."""
        other = [*messages[:number], Message("assistant", _CONTENT), *messages[number + 1 :]]
        before, found, after = self._rendered(other, tools).partition(_CONTENT)
        end = self._end.match(after)
        words = len(rendered) - len(after)
        if not (found and end and len(before) <= words and rendered.startswith(before) and rendered.endswith(after)):
            return None
        return len(before), words + end.end()

    def _by_prefix(self, rendered: str, messages: Turns, tools: Tools, number: int) -> Span | None:
        """The rendering of the turns before, with the prompt to answer, and up to it: both must begin the whole."""
        before = self._rendered(messages[:number], tools, prompt=True)
        said = self._ended.search(self._rendered(messages[: number + 1], tools))
        upto = said.string[: said.end()].rstrip() if said else ""
        fits = len(before) < len(upto) and upto.startswith(before) and rendered.startswith(upto)
        return (len(before), len(upto)) if fits else None


def _holds(said: str, m: Message) -> bool:
    """Whether all that the assistant said is there: a template may leave out earlier reasoning."""
    return all(part.strip() in said for part in (m.content, m.reasoning, *(call["name"] for call in m.tool_calls)))


def _without_marks(rendered: str) -> tuple[str, list[Span]]:
    """The text of a rendering, and the spans that were between marks."""
    pieces = re.split(f"[{_OPEN}{_CLOSE}]", rendered)
    spans, place = [], 0
    for number, piece in enumerate(pieces):
        if number % 2:
            spans.append((place, place + len(piece)))
        place += len(piece)
    return "".join(pieces), spans


def _as_dict(m: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": m.role, "content": m.content}
    if m.tool_calls:
        turn["tool_calls"] = [{"type": "function", "function": call} for call in m.tool_calls]
    if m.reasoning:
        turn["reasoning_content"] = turn["thinking"] = m.reasoning
    return turn


@lru_cache(maxsize=16)
def _compiled(source: str) -> Callable[..., str]:
    """The template as transformers compiles it, but for two things: generation blocks leave marks around what they
    write, and today is always the same day, so that the same data gives the same tokens tomorrow."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as error:
        raise UserError(f"data.template: not a Jinja template: {error}") from None
