"""The reference: what the source of an export says to the probes. It is stored in the export, so that the export can be
verified without its source.

`probes.json` has texts, token ids, greedy tokens, and the log probabilities of some tokens at some positions: the
likeliest ones, and others spread over the vocabulary. They are in this file since vLLM takes every safetensors file of
a folder for weights.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.errors import RunFailed
from sojourn.export.probes import PROBES_FILE, Probe
from sojourn.infer.runtimes.base import Runtime
from sojourn.storage.files import NotValid, load_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    Array = np.ndarray[Any, Any]

FORMAT = 1
GREEDY_TOKENS = 32
_POSITIONS = 8  # of a prompt; greedy tokens are all compared
_LIKELIEST, _SPREAD = 32, 96  # tokens whose log probabilities are kept at a position


@dataclass(frozen=True)
class Answer:
    """What the source says to one probe. Row i of `tokens` and `logprobs` is what `forced[: positions[i] + 1]`
    predicts, the likeliest token first. `greedy`: None where it was not computed."""

    probe: Probe
    text: str
    ids: list[int]
    greedy: list[int] | None = None
    positions: list[int] = field(default_factory=list)
    tokens: Array = field(default_factory=lambda: np.empty((0, 0), np.int32))
    logprobs: Array = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def forced(self) -> list[int]:
        return [*self.ids, *(self.greedy or [])][: max(self.positions, default=-1) + 1]

    def row_of_greedy(self, step: int) -> int:
        """The row that predicts this greedy token."""
        return self.positions.index(len(self.ids) - 1 + step)


@dataclass(frozen=True)
class Reference:
    """`stop_ids`: where an answer must end. `dated`: the template writes today's date, for which a fixed one was taken.
    `runtime`: what answered. `notes`: what was left out, and why."""

    answers: list[Answer]
    stop_ids: list[int]
    dated: bool
    runtime: str
    notes: list[str] = field(default_factory=list)


def build_reference(runtime: Runtime, probes: Iterable[Probe], context: int) -> Reference:
    """`context`: the most tokens that the model takes."""
    answers, seen, notes = [], set(), []
    for probe in probes:
        answer = _texts_and_ids(runtime, probe)
        if answer is not None and answer.ids and (answer.text, probe.messages is None) not in seen:
            seen.add((answer.text, probe.messages is None))
            answers.append(_with_positions(runtime, answer, context))
    if not answers:
        raise RunFailed("the parity gate has nothing to compare: the chat template rejects every probe")
    stops = _stop_ids(runtime)
    if not stops:
        notes.append("the source names no stop token, so it never ends an answer by itself")
    if all(one.greedy is None for one in answers):
        notes.append("greedy text is not compared: the model is too large to generate with here")
    dated = "strftime_now" in str(getattr(getattr(runtime, "tokenizer", None), "chat_template", ""))
    return Reference(_with_logprobs(runtime, answers), stops, dated, runtime.name, notes)


def _texts_and_ids(runtime: Runtime, probe: Probe) -> Answer | None:
    """None where the source's template does not take such a chat."""
    if probe.messages is None:
        return Answer(probe, probe.text or "", runtime.encode(probe.text or "", probe.add_special_tokens))
    try:
        text = runtime.render(probe.messages, probe.tools, probe.add_generation_prompt)
        if probe.tools and text == runtime.render(probe.messages, None, probe.add_generation_prompt):
            return None  # the template knows no tools
    except ValueError:
        if probe.text is None:
            return None
        raise RunFailed("the source's chat template rejects a chat that it was trained on; was it changed?") from None
    if text is None:
        if probe.text is None:
            return None
        text = probe.text
        probe = Probe(text=text, ids=probe.ids)
    ids = runtime.encode(text)
    if (probe.text is not None and text != probe.text) or (probe.ids is not None and ids != probe.ids):
        what = "chat template" if text != probe.text else "tokenizer"
        raise RunFailed(f"the source's {what} is not the one it was trained with; copy it from the run's prepared data")
    return Answer(probe, text, ids)


def _with_positions(runtime: Runtime, answer: Answer, context: int) -> Answer:
    """The greedy continuation, and the positions whose logits are compared."""
    prompt = min(len(answer.ids), context)
    some = {round(index) for index in np.linspace(0, prompt - 1, min(_POSITIONS, prompt))}
    greedy = None
    if answer.probe.generates and len(answer.ids) < context:
        greedy = runtime.greedy(answer.ids, min(GREEDY_TOKENS, context - len(answer.ids)))
    after = range(len(answer.ids) - 1, len(answer.ids) - 1 + len(greedy or []))
    return Answer(answer.probe, answer.text, answer.ids, greedy, sorted({*some, *after}))


def _with_logprobs(runtime: Runtime, answers: list[Answer]) -> list[Answer]:
    rows = runtime.logits_at([one.forced for one in answers], [one.positions for one in answers])
    if rows is None:
        raise RunFailed(f"{runtime.name} gives no logits of the source")
    found = []
    for answer, logits in zip(answers, rows, strict=True):
        if not np.isfinite(logits).all():
            raise RunFailed("the source's own logits are not finite, so no export of it can be checked")
        logprobs = log_softmax(logits)
        tokens = np.stack([_kept_tokens(row) for row in logits])
        kept = np.take_along_axis(logprobs, tokens, 1).astype(np.float32)
        found.append(
            Answer(
                answer.probe, answer.text, answer.ids, answer.greedy, answer.positions, tokens.astype(np.int32), kept
            )
        )
    return found


def _kept_tokens(logits: Array) -> Array:
    """The likeliest tokens, likeliest first, then some of the others, spread evenly."""
    order = np.argsort(-logits, kind="stable")
    others = np.sort(order[_LIKELIEST:])
    spread = np.linspace(0, len(others) - 1, min(_SPREAD, len(others))).round().astype(int) if len(others) else []
    return np.concatenate([order[:_LIKELIEST], others[spread]])


def log_softmax(logits: Array) -> Array:
    """NaN where a row has NaN or infinity."""
    wide = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        wide -= wide.max(-1, keepdims=True)
        found: Array = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return found


def _stop_ids(runtime: Runtime) -> list[int]:
    """The end-of-turn token of the template and the tokenizer's eos, as far as the source stops at them. Other stop
    tokens of a model are for tools or plain texts, and not every program knows them."""
    last = "Goodbye"
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": last}]
    try:
        text = runtime.render(turns, None, False) or ""
    except ValueError:
        text = ""
    after = runtime.encode(text.rpartition(last)[2]) if last in text else []
    found = [token for token in after if runtime.stops_at(token)][:1]
    eos = getattr(getattr(runtime, "tokenizer", None), "eos_token_id", None)
    return list(dict.fromkeys([*found, *([eos] if eos is not None and runtime.stops_at(eos) else [])]))


def save_reference(reference: Reference, folder: Path) -> None:
    """Writes `probes.json`."""
    probes = []
    for one in reference.answers:
        probe = one.probe
        probes.append({
            "messages": probe.messages, "tools": probe.tools, "add_generation_prompt": probe.add_generation_prompt,
            "add_special_tokens": probe.add_special_tokens, "text": one.text, "ids": one.ids,
            "positions": one.positions, "greedy": one.greedy, "tokens": _packed(one.tokens, "<i4"),
            "logprobs": _packed(one.logprobs, "<f4"),
        })  # fmt: skip
    facts = {key: getattr(reference, key) for key in ("runtime", "stop_ids", "dated", "notes")}
    write_json(folder / PROBES_FILE, {"format": FORMAT, **facts, "probes": probes})


def _packed(rows: Array, dtype: str) -> str:
    """Little-endian numbers in base64: as JSON numbers they would take four times the space."""
    return b64encode(rows.astype(dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str, rows: int) -> Array:
    return np.frombuffer(b64decode(text, validate=True), dtype).reshape(rows, -1)


def load_reference(folder: Path) -> Reference:
    """As `save_reference` wrote it. One line where the files are something else."""
    try:
        facts = load_json(folder / PROBES_FILE)
        if isinstance(facts, dict) and type(facts.get("format")) is int and facts["format"] > FORMAT:
            raise RunFailed(
                f"{folder / PROBES_FILE}: written by a newer version of sojourn; run: pip install -U sojourn"
            )
        answers = [_answer(one, index) for index, one in enumerate(facts["probes"])]
        stops, dated = list(map(int, facts["stop_ids"])), bool(facts["dated"])
        return Reference(answers, stops, dated, str(facts["runtime"]), list(facts["notes"]))
    except FileNotFoundError as error:
        raise RunFailed(
            f"{error.filename}: no such file, so there is nothing to replay; copy the folder again"
        ) from None
    except (NotValid, KeyError, TypeError, ValueError, IndexError) as error:
        raise RunFailed(f"{folder}: its probes cannot be read ({_brief(error)}); copy the folder again") from None


def _answer(one: dict[str, Any], index: int) -> Answer:
    prompt, special = bool(one["add_generation_prompt"]), bool(one["add_special_tokens"])
    probe = Probe(one["messages"], one["tools"], add_generation_prompt=prompt, add_special_tokens=special)
    count = len(one["positions"])
    tokens, logprobs = _unpacked(one["tokens"], "<i4", count), _unpacked(one["logprobs"], "<f4", count)
    answer = Answer(probe, one["text"], one["ids"], one["greedy"], one["positions"], tokens, logprobs)
    numbers = [*answer.ids, *answer.positions, *(answer.greedy or [])]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"probe {index + 1} has no token ids")
    if tokens.shape != logprobs.shape or len(tokens) != len(answer.positions) or not isinstance(answer.text, str):
        raise ValueError(f"probe {index + 1} is damaged")
    if len(answer.forced) != max(answer.positions) + 1:
        raise ValueError(f"probe {index + 1} is too short")
    return answer


def _brief(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:100]
