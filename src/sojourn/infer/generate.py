"""Generation: prompts in, completions out, by the engine in this process. What a prompt gets does not depend on the
prompts beside it."""

from __future__ import annotations

import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sojourn.errors import RunFailed
from sojourn.infer.detokenize import Detokenizer, make_decode
from sojourn.infer.engine.request import Request, Token
from sojourn.infer.load import LoadedModel, context_length
from sojourn.infer.open_engine import open_loop
from sojourn.infer.sampling import SamplingParams, row_key
from sojourn.infer.stop_strings import StopStrings
from sojourn.machine.out_of_memory import free_memory, is_oom

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_ROWS = 64
_WAITING = 4  # prompts that are taken ahead for each one at a time: completions come in order, however long each takes


@dataclass(frozen=True)
class Prompt:
    """`index` and `sample` (of several answers) decide what is drawn, together with the seed."""

    ids: Sequence[int]
    index: int = 0
    sample: int = 0


@dataclass(frozen=True)
class Completion:
    """`text`: without the prompt and without special tokens. `finish_reason`: stop (a stop token or a stop string) or
    length. `tokens`: generated ones."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    tokens: int


def draw_seed() -> int:
    return secrets.randbits(32)


class Generator:
    """Takes the weights of a loaded model, which cannot be used otherwise from then on. `batch_size`: the most prompts
    at a time; halved for good when memory runs out. `context`: tokens of a prompt and its completion."""

    def __init__(self, loaded: LoadedModel, batch_size: int | None = None) -> None:
        self.loaded, self.batch_size = loaded, batch_size or _MOST_ROWS
        self._engine = open_loop(loaded, self.batch_size)
        self.context = min(self._engine.options.context, self._engine.scheduler.capacity)
        self._decode = make_decode(loaded.tokenizer)
        self._stop_ids = find_stop_ids(loaded.model, loaded.tokenizer)
        self._special = {str(token): number for number, token in loaded.tokenizer.added_tokens_decoder.items()}

    def check(self, ids: Sequence[int]) -> str | None:
        """Why the model cannot answer a prompt; None where it can."""
        if not ids:
            return "it is empty; give some text"
        if len(ids) < self.context:
            return None
        known = context_length(self.loaded.model)
        whose = "the model's context is" if self.context == known else "the memory here holds"
        return f"it has {len(ids):,} tokens, but {whose} {self.context:,}; shorten it"

    def describe_cut(self, completion: Completion, params: SamplingParams) -> str | None:
        """Why an answer ends before the model ended it; None where it did not."""
        if completion.finish_reason != "length":
            return None
        cut = f"cut after {completion.tokens:,} tokens"
        if completion.tokens < params.max_tokens:
            return f"{cut}: prompt and answer fill the model's context of {self.context:,}"
        return f"{cut}; for more: --max-tokens {2 * params.max_tokens}"

    def __call__(
        self, prompts: Iterable[Prompt], params: SamplingParams, on_tokens: Callable[[int], None] | None = None
    ) -> Iterator[Completion]:
        """One completion a prompt, in order. Each prompt must pass `check`, and is taken when there is room for it.
        `on_tokens` is called after each step with the number of new tokens."""
        seed = draw_seed() if params.seed is None else params.seed
        coming, answers = iter(prompts), deque[_Answer]()
        try:
            while True:
                while len(answers) < _WAITING * self.batch_size and (prompt := next(coming, None)) is not None:
                    answers.append(self._add(prompt.ids, params, row_key(seed, prompt.index, prompt.sample)))
                if not answers:
                    return
                while answers and answers[0].is_done:
                    yield self._completion(answers.popleft())
                if self._engine.has_work:
                    count = self._step(answers)
                    if on_tokens is not None:
                        on_tokens(count)
        finally:
            self._engine.cancel_all()

    def stream(
        self, prompt: Prompt, params: SamplingParams, on_text: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Completion:
        """`on_text` gets the text as it is generated."""
        key = row_key(params.seed or 0, prompt.index, prompt.sample)
        answers = deque([self._add(prompt.ids, params, key, on_text)])
        try:
            while not answers[0].is_done:
                self._step(answers)
                if should_stop():
                    break
        finally:
            self._engine.cancel_all()
        return self._completion(answers[0])

    def _add(
        self, ids: Sequence[int], params: SamplingParams, key: int, on_text: Callable[[str], None] | None = None
    ) -> _Answer:
        stop_ids = self._stop_ids | {self._special[stop] for stop in params.stop if stop in self._special}
        stops = [stop for stop in params.stop if stop not in self._special]
        most = min(params.max_tokens, self.context - len(ids))
        text = _Text(self._decode, stops, on_text) if stops or on_text is not None else None
        answer = _Answer("", ids, params, key, most, stop_ids, text=text)
        self._engine.add(answer)
        return answer

    def _step(self, answers: deque[_Answer]) -> int:
        """The number of new tokens."""
        try:
            outputs = self._engine.step()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            self._retry_with_fewer(answers)
            return 0
        for output in outputs:
            answer = output.request
            assert isinstance(answer, _Answer)  # noqa: S101
            if answer.finish_reason == "error":
                raise RunFailed(
                    f"{answer.error}: its weights are damaged, or its dtype overflows; check the model with: "
                    "sojourn eval MODEL"
                )
            if answer.has_stop_string(output.tokens):
                answer.finish_reason = "stop"
                self._engine.cancel(answer)
            answer.is_done = answer.is_finished
        return sum(len(output.tokens) for output in outputs)

    def _retry_with_fewer(self, answers: deque[_Answer]) -> None:
        """After memory ran out; answers that are not finished begin anew."""
        scheduler, unfinished = self._engine.scheduler, [at for at, one in enumerate(answers) if not one.is_done]
        self.batch_size = scheduler.max_rows = len(scheduler.running) // 2
        scheduler.max_tokens = max(1, scheduler.max_tokens // 2)
        self._engine.cancel_all()
        free_memory()
        if not self.batch_size:
            raise RunFailed(
                f"memory ran out with a single prompt of {len(answers[unfinished[0]].prompt):,} tokens; shorten it, "
                "lower --max-tokens, or use a machine with more memory"
            )
        for at in unfinished:
            answers[at] = self._add(answers[at].prompt, answers[at].params, answers[at].key)
        note = f"note: memory ran out; from here on {self.batch_size} prompts at a time"
        print(note, file=sys.stderr, flush=True)

    def _completion(self, answer: _Answer) -> Completion:
        tokens = answer.tokens
        if answer.text is not None:
            text = answer.text.finish()
        else:
            text = self._decode(tokens[:-1] if tokens and tokens[-1] in answer.stop_ids else tokens)
        is_stopped = answer.finish_reason == "stop"
        return Completion(text, "stop" if is_stopped else "length", len(answer.prompt), len(tokens))


@dataclass(eq=False)
class _Answer(Request):
    """`text`: where it is made as tokens come. `is_done`: all of it is there."""

    text: _Text | None = None
    is_done: bool = False

    def has_stop_string(self, tokens: Sequence[Token]) -> bool:
        """Adds the tokens to the text."""
        return self.text is not None and any(self.text.add(one.id) for one in tokens if one.id not in self.stop_ids)


class _Text:
    """The text of an answer, up to its first stop string."""

    def __init__(
        self, decode: Callable[[list[int]], str], stops: list[str], on_text: Callable[[str], None] | None
    ) -> None:
        self._detokenizer, self._stops, self._on_text = Detokenizer(decode), StopStrings(stops), on_text
        self._pieces: list[str] = []

    def add(self, token: int) -> bool:
        """Whether a stop string has come."""
        self._write(self._stops.add(self._detokenizer.add(token)))
        return self._stops.stopped

    def finish(self) -> str:
        self._write(self._stops.add(self._detokenizer.finish()))
        self._write(self._stops.finish())
        return "".join(self._pieces)

    def _write(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._on_text is not None:
                self._on_text(piece)


def find_stop_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: as the model's generation settings say, else the tokenizer's end-of-text token."""
    found: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    if found is None:
        found = tokenizer.eos_token_id
    return frozenset() if found is None else frozenset(found if isinstance(found, list) else [int(found)])
