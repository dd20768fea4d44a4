"""A request as the engine sees it: a prompt of token ids, what to sample, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from sojourn.infer.grammar import GrammarMask
    from sojourn.infer.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error", "cancelled"]


class Token(NamedTuple):
    """A generated token. `logprob` and `top` (the most likely tokens, with theirs): where the request wants them."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """`key`: see `sampling.row_key`. `most`: tokens it may generate. `adapter`: its name, None for the base model.
    `logprobs`: how many of the most likely tokens to report; None: no log probabilities. `prompt_logprobs`: the same
    for the prompt's tokens. `mask`: the tokens that may come next."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    key: int
    most: int
    stop_ids: frozenset[int] = frozenset()
    adapter: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    mask: GrammarMask | None = None

    # -- State, of the scheduler and the engine --
    tokens: list[int] = field(default_factory=list)  # generated and read
    row: int = -1  # of the device's buffer of last tokens, while it is running
    scheduled: int = 0  # tokens whose KV is computed, or will be by a step that was launched
    unread: int = 0  # sampled by a step that was launched, not read yet
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of full blocks in the prefix cache
    cached: int = 0  # tokens of the prompt found in the prefix cache
    prompt_scores: list[Token] = field(default_factory=list)  # of the prompt's tokens but the first
    error: str | None = None
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens so far, those of steps that were launched included."""
        return len(self.prompt) + len(self.tokens) + self.unread

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_full(self) -> bool:
        """Whether all tokens that it may generate are sampled, read or not."""
        return len(self.tokens) + self.unread >= self.most

    @property
    def needs_last_token(self) -> bool:
        """Whether the next step can be prepared only when the last token is read."""
        return self.has_penalties or self.mask is not None

    @property
    def has_penalties(self) -> bool:
        p = self.params
        return bool(p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty)

    def token_at(self, position: int) -> int:
        """-1 - `row` where it is not read yet: the device has it there."""
        if position < len(self.prompt):
            return self.prompt[position]
        position -= len(self.prompt)
        return self.tokens[position] if position < len(self.tokens) else -1 - self.row
