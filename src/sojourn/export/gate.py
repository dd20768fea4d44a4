"""The parity gate: replays the probes of a reference in a runtime, and compares in the order template, token ids, stop
tokens, logits, greedy text. It ends at the first of these that differs.

Logits are compared as log probabilities of the same tokens, centred: the relative error is then that of the logits
themselves. Another argmax, at any position or in the greedy text, counts only where the source itself was sure: its own
token was likelier than the other by more than the tolerance's `gap`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.export.reference import Answer, Reference, log_softmax
from sojourn.export.tolerances import Tolerance
from sojourn.infer.runtimes.base import Runtime

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_AROUND = 24  # characters shown before and after a difference
_GAPS = 8  # that are recorded
_AT_LEAST = 16  # log probabilities of the same tokens, else a position is not compared


@dataclass(frozen=True)
class Difference:
    """`kind`: template, token ids, stop token, logits or greedy text."""

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.where}: {self.message}"


@dataclass
class Replay:
    """What a runtime was asked and how far it is from the reference. `figures`: of what was compared. `gaps`: the
    largest, in nats, where the likeliest token is another one."""

    runtime: str
    differences: list[Difference] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.differences

    def summary(self) -> str:
        """What was compared, and how far apart it is."""
        compared = ", ".join(f"{count} {what}" for what, count in self.compared.items())
        figures = [
            f"{name} {value:.0%}" if name.startswith("same") else f"{name} {value:.1e}"
            for name, value in self.figures.items()
        ]
        missing = f"; not compared: {', '.join(self.not_compared)}" if self.not_compared else ""
        return f"replayed in {self.runtime}: {compared} ({', '.join(figures)}){missing}"

    def facts(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        figures = {name: value if np.isfinite(value) else None for name, value in self.figures.items()}
        return {**asdict(self), "figures": figures, "passed": self.passed}


def check(reference: Reference, runtime: Runtime, tolerance: Tolerance) -> Replay:
    """What the user sees is the first difference."""
    replay = Replay(runtime.name)
    for stage in (_templates, _token_ids, _stop_tokens, _logits, _greedy):
        try:
            replay.differences += stage(reference, runtime, tolerance, replay)
        except (IndexError, RuntimeError, ValueError) as error:  # such as a token beyond the embedding
            why = " ".join(str(error).split())[:200] or type(error).__name__
            kind = stage.__name__.strip("_").replace("_", " ")
            replay.differences.append(Difference(kind, "all probes", f"{runtime.name} fails: {why}"))
        if replay.differences:
            break
    return replay


def _templates(reference: Reference, runtime: Runtime, _: Tolerance, replay: Replay) -> Iterator[Difference]:
    compared = 0
    for number, answer in _numbered(reference):
        probe = answer.probe
        if probe.messages is None:
            continue
        chat, ids = (probe.messages, probe.tools, probe.add_generation_prompt), None
        try:
            text = runtime.render(*chat)
            if text is None and not reference.dated:
                ids = runtime.render_ids(*chat)
        except ValueError as error:
            yield Difference("template", number, f"{runtime.name} rejects the chat: {error}")
            continue
        if text is None and ids is None:
            replay.not_compared.append("template, which writes today's date" if reference.dated else "template")
            return
        compared += 1
        if text is not None and text != answer.text:
            yield Difference("template", number, _first_character(answer.text, text, runtime.name))
        if ids is not None and ids != answer.ids:
            yield Difference("template", number, _first_token(answer.ids, ids, runtime.name))
    replay.compared["templates"] = compared


def _token_ids(reference: Reference, runtime: Runtime, _: Tolerance, replay: Replay) -> Iterator[Difference]:
    for number, answer in _numbered(reference):
        ids = runtime.encode(answer.text, answer.probe.add_special_tokens)
        if ids != answer.ids:
            yield Difference("token ids", number, _first_token(answer.ids, ids, runtime.name))
    replay.compared["token ids"] = len(reference.answers)


def _stop_tokens(reference: Reference, runtime: Runtime, _: Tolerance, replay: Replay) -> Iterator[Difference]:
    for token in reference.stop_ids:
        stops = runtime.stops_at(token)
        if stops is None:
            replay.not_compared.append("stop tokens")
            return
        if not stops:
            message = f"the source ends an answer there, {runtime.name} goes on; is it the eos token of the export?"
            yield Difference("stop token", str(token), message)
    replay.compared["stop tokens"] = len(reference.stop_ids)


def _logits(reference: Reference, runtime: Runtime, tolerance: Tolerance, replay: Replay) -> Iterator[Difference]:
    rows = list(_compared_rows(reference, runtime))
    if not rows:
        replay.not_compared.append("logits")
        return
    squared_error = squared = divergence = same = 0.0
    for row in rows:
        squared_error, squared = squared_error + row.squared_error, squared + row.squared
        divergence, same = divergence + row.divergence, same + (row.gap == 0)
        error = (row.squared_error / max(row.squared, 1e-30)) ** 0.5
        replay.figures["worst relative error"] = max(error, replay.figures.get("worst relative error", 0.0))
        if not error <= tolerance.worst:
            message = f"relative error {error:.2g} in {runtime.name}, allowed {tolerance.worst:.2g}"
            yield Difference("logits", row.where, message)
        elif row.gap > tolerance.gap:
            yield Difference("logits", row.where, f"{row.other}, allowed {tolerance.gap:.2g}")
    figures = {
        "relative error": (squared_error / max(squared, 1e-30)) ** 0.5, "KL divergence": divergence / len(rows),
        "same argmax": same / len(rows),
    }  # fmt: skip
    replay.figures |= figures
    replay.gaps = sorted((row.gap for row in rows if row.gap), reverse=True)[:_GAPS]
    replay.compared["positions"] = len(rows)
    for name, most in (("relative error", tolerance.error), ("KL divergence", tolerance.kl)):
        if not figures[name] <= most:
            message = f"{name} {figures[name]:.2g} in {runtime.name}, allowed {most:.2g}"
            yield Difference("logits", f"mean of {len(rows)} positions", message)


@dataclass(frozen=True)
class _Row:
    """One position. `gap`: in nats, how much less likely the source finds the runtime's argmax than its own; 0 where
    they are the same. `other`: these two tokens, for a message."""

    where: str
    squared_error: float
    squared: float
    divergence: float
    gap: float
    other: str


def _compared_rows(reference: Reference, runtime: Runtime) -> Iterator[_Row]:
    answers = [(number, answer) for number, answer in _numbered(reference) if answer.positions]
    batch, positions = [one.forced for _, one in answers], [one.positions for _, one in answers]
    logits = runtime.logits_at(batch, positions)
    for index, (number, answer) in enumerate(answers):
        if logits is not None:
            found = _gather(logits[index], answer)
        else:
            top = runtime.top_logprobs(batch[index], answer.tokens.shape[1])
            if top is None:
                return
            found = ((_from_top(top[p], t), max(top[p], key=top[p].__getitem__, default=-1))
                     for p, t in zip(positions[index], answer.tokens, strict=True))  # fmt: skip
        for position, expected, tokens, (theirs, argmax) in zip(
            answer.positions, answer.logprobs, answer.tokens, found, strict=True
        ):
            row = _compare(f"{number}, position {position + 1}", expected, tokens, theirs, argmax, runtime.name)
            if row is not None:
                yield row


def _gather(logits: Array, answer: Answer) -> Iterator[tuple[Array, int]]:
    """The log probabilities of the reference's tokens; NaN for tokens that the export does not have."""
    for row, tokens in zip(log_softmax(logits), answer.tokens, strict=True):
        known = tokens < len(row)
        yield np.where(known, row[np.where(known, tokens, 0)], np.nan), int(row.argmax())


def _from_top(top: dict[int, float], tokens: Array) -> Array:
    return np.array([top.get(int(token), np.nan) for token in tokens])


def _compare(where: str, expected: Array, tokens: Array, found: Array, argmax: int, runtime: str) -> _Row | None:
    both = ~np.isnan(found) if np.isfinite(found).any() else np.ones(len(found), bool)
    if both.sum() < min(_AT_LEAST, len(tokens)):
        return None
    ours, theirs = expected[both].astype(np.float64), found[both].astype(np.float64)
    error = (theirs - theirs.mean()) - (ours - ours.mean())
    centred = ours - ours.mean()
    gap, other = 0.0, ""
    if argmax != tokens[0]:
        match = np.flatnonzero(tokens == argmax)
        known = expected[match[0]] if len(match) else expected.min()
        gap = float(expected[0] - known)
        other = f"the likeliest token is {argmax} in {runtime}, {tokens[0]} in the source, by {gap:.2g} nats"
    return _Row(where, _dot(error), _dot(centred), _divergence(ours, theirs), gap, other)


def _dot(values: Array) -> float:
    return float(values @ values)


def _divergence(ours: Array, theirs: Array) -> float:
    """KL divergence; all other tokens count as one."""
    p, q = np.exp(ours), np.exp(theirs)
    rest_p, rest_q = max(1.0 - p.sum(), 1e-12), max(1.0 - q.sum(), 1e-12)
    return float((p * (ours - theirs)).sum() + rest_p * np.log(rest_p / rest_q))


def _greedy(reference: Reference, runtime: Runtime, tolerance: Tolerance, replay: Replay) -> Iterator[Difference]:
    same = total = 0
    for number, answer in _numbered(reference):
        if not answer.greedy:
            continue
        tokens = runtime.greedy(answer.ids, len(answer.greedy))
        if tokens is None:
            replay.not_compared.append("greedy text")
            return
        total += 1
        if tokens == answer.greedy:
            same += 1
            continue
        at = _first_index(answer.greedy, tokens)
        expected, found = answer.greedy[at : at + 1], tokens[at : at + 1]
        gap = _gap(answer, at, found[0] if found else None)
        if gap > tolerance.gap:
            message = (
                f"at token {at + 1}: expected {_or_end(expected)}, {runtime.name} has {_or_end(found)}; "
                f"the source finds its own likelier by {gap:.2g} nats, allowed {tolerance.gap:.2g}"
            )
            yield Difference("greedy text", number, message)
    if total:
        replay.figures["same greedy text"] = same / total
        replay.compared["greedy texts"] = total


def _gap(answer: Answer, step: int, found: int | None) -> float:
    """How much likelier the source finds its own greedy token than `found`."""
    if found is None or answer.greedy is None or step >= len(answer.greedy):
        return float("inf")
    row = answer.row_of_greedy(step)
    match = np.flatnonzero(answer.tokens[row] == found)
    other = answer.logprobs[row][match[0]] if len(match) else answer.logprobs[row].min()
    return float(answer.logprobs[row][0] - other)


def _numbered(reference: Reference) -> Iterator[tuple[str, Answer]]:
    counts = {"chat": 0, "text": 0}
    for answer in reference.answers:
        kind = "text" if answer.probe.messages is None else "chat"
        counts[kind] += 1
        yield f"{kind} {counts[kind]}", answer


def _first_index(expected: list[int], found: list[int]) -> int:
    pairs = zip(expected, found, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found)))


def _first_token(expected: list[int], found: list[int], runtime: str) -> str:
    at = _first_index(expected, found)
    return f"at token {at + 1}: expected {expected[at : at + 4]}, {runtime} has {found[at : at + 4]}"


def _first_character(expected: str, found: str, runtime: str) -> str:
    at = _first_index([ord(c) for c in expected], [ord(c) for c in found])
    ours, theirs = (_shown(text, at) for text in (expected, found))
    return f"at character {at + 1}: expected {ours}, {runtime} has {theirs}"


def _shown(text: str, at: int) -> str:
    part = text[max(0, at - _AROUND) : at + _AROUND]
    return (
        f"“{'…' if at > _AROUND else ''}{part.encode('unicode_escape').decode() if not part.isprintable() else part}…”"
    )


def _or_end(tokens: list[int]) -> str:
    return str(tokens[0]) if tokens else "the end"
