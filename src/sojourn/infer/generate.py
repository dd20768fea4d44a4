"""Generation: prompts in, completions out, in batches. What a prompt gets does not depend on the prompts beside it."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sojourn.errors import RunFailed
from sojourn.infer.decode import Row, decode, supports_padding
from sojourn.infer.detokenize import Detokenizer, make_decode
from sojourn.infer.load import LoadedModel, context_length
from sojourn.infer.sampling import SamplingParams, row_key
from sojourn.infer.stop_strings import StopStrings
from sojourn.machine.out_of_memory import free_memory, is_oom

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_ROWS = 64
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")  # the longest row of a batch decides the frequencies of all


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


def check_prompt(loaded: LoadedModel, ids: Sequence[int]) -> str | None:
    """Why the model cannot answer a prompt; None where it can."""
    context = context_length(loaded.model)
    if not ids:
        return "it is empty; give some text"
    if len(ids) >= context:
        return f"it has {len(ids):,} tokens, but the model's context is {context:,}; shorten it"
    return None


def generate(
    loaded: LoadedModel, prompts: Sequence[Prompt], params: SamplingParams, batch_size: int | None = None
) -> list[Completion]:
    """One completion a prompt, each of which must pass `check_prompt`."""
    return Generator(loaded, params, batch_size)(prompts)


class Generator:
    """`batch_size`: the most prompts at a time; halved for good when memory runs out. `on_step`: see `decode`."""

    def __init__(
        self,
        loaded: LoadedModel,
        params: SamplingParams,
        batch_size: int | None = None,
        on_step: Callable[[int], bool] | None = None,
    ) -> None:
        self._loaded, self._params, self._on_step = loaded, params, on_step
        self._seed = draw_seed() if params.seed is None else params.seed
        self.batch_size = batch_size or _MOST_ROWS
        self._may_exceed_memory = batch_size is not None

    def __call__(self, prompts: Sequence[Prompt]) -> list[Completion]:
        writer = _Writer(self._loaded, self._params)
        rows = [writer.row(prompt, row_key(self._seed, prompt.index, prompt.sample)) for prompt in prompts]
        order = sorted(range(len(rows)), key=lambda at: -len(rows[at].prompt))  # like lengths in a batch: less padding
        fitting = _fitting_rows(self._loaded, rows, self._may_exceed_memory)
        done = 0
        while done < len(order):
            batch = [rows[at] for at in order[done : done + min(self.batch_size, fitting)]]
            if self._fits(batch, writer):
                done += len(batch)
                continue
            self.batch_size = len(batch) // 2
            for at in order[done : done + len(batch)]:
                rows[at] = writer.row(prompts[at], rows[at].key)
            del batch
            free_memory()
            note = f"note: memory ran out; from here on {self.batch_size} prompts at a time"
            print(note, file=sys.stderr, flush=True)
        return [writer.completion(row) for row in rows]

    def _fits(self, batch: list[_TextRow], writer: _Writer) -> bool:
        """Generates the batch; False where memory runs out."""
        try:
            decode(self._loaded.model, batch, writer.stop_ids, writer.pad_id, on_step=self._on_step)
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            if len(batch) == 1:
                raise _out_of_memory(batch[0]) from None
            return False
        return True


def generate_streamed(
    loaded: LoadedModel,
    prompt: Prompt,
    params: SamplingParams,
    on_text: Callable[[str], None],
    should_stop: Callable[[], bool],
    cache: Any = None,
) -> tuple[Completion, list[int]]:
    """The completion and its tokens. `on_text` gets the text as it is generated. `cache`: a KV cache with the beginning
    of the prompt, which is filled further."""
    writer = _Writer(loaded, params, on_text)
    row = writer.row(prompt, row_key(params.seed or 0, prompt.index, prompt.sample))
    try:
        decode(loaded.model, [row], writer.stop_ids, writer.pad_id, cache, lambda _: should_stop())
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise _out_of_memory(row) from None
    return writer.completion(row), row.tokens


def _out_of_memory(row: Row) -> RunFailed:
    return RunFailed(
        f"memory ran out with a single prompt of {len(row.prompt):,} tokens; shorten it, lower --max-tokens, or use a "
        "machine with more memory"
    )


class _Writer:
    """Rows of prompts, and the text of what they generated."""

    def __init__(
        self, loaded: LoadedModel, params: SamplingParams, on_text: Callable[[str], None] | None = None
    ) -> None:
        tokenizer = loaded.tokenizer
        self._decode, self._params, self._on_text = make_decode(tokenizer), params, on_text
        self._context = context_length(loaded.model)
        special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        self.stop_ids = find_stop_ids(loaded.model, tokenizer) | {special[s] for s in params.stop if s in special}
        self._stops = [stop for stop in params.stop if stop not in special]
        self.pad_id = find_pad_id(tokenizer)

    def row(self, prompt: Prompt, key: int) -> _TextRow:
        row = _TextRow(prompt.ids, self._params, key, min(self._params.max_tokens, self._context - len(prompt.ids)))
        if self._stops or self._on_text is not None:
            row.text = _RowText(self._decode, self._stops, self._on_text)
            row.on_token = row.text.add
        return row

    def completion(self, row: _TextRow) -> Completion:
        tokens = row.tokens
        if row.text is not None:
            text = row.text.finish()
        else:
            text = self._decode(tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens)
        return Completion(text, "stop" if row.stopped else "length", len(row.prompt), len(tokens))


class _RowText:
    """The text of a row, up to its first stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stops: list[str], on_text: Any) -> None:
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


@dataclass
class _TextRow(Row):
    """`text`: where it is made as the row is generated."""

    text: _RowText | None = None


def find_stop_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: as the model's generation settings say, else the tokenizer's end-of-text token."""
    found: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    if found is None:
        found = tokenizer.eos_token_id
    return frozenset() if found is None else frozenset(found if isinstance(found, list) else [int(found)])


def find_pad_id(tokenizer: Any) -> int:
    """Any token will do: attention masks hide it."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else 0


def generate_tokens(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], params: SamplingParams, stop_ids: Sequence[int]
) -> list[list[int]]:
    """The new tokens of each prompt, at most as many as fit the model's context, without the stop token."""
    context = context_length(model)
    rows = [
        Row(ids, params, row_key(0, at), min(params.max_tokens, context - len(ids))) for at, ids in enumerate(prompts)
    ]
    decode(model, rows, frozenset(stop_ids), 0)
    return [row.tokens[:-1] if row.stopped else row.tokens for row in rows]


def _fitting_rows(loaded: LoadedModel, rows: Sequence[Row], may_exceed_memory: bool) -> int:
    """As many rows as may share a batch: where half of the free memory holds their KV cache, unless that is the user's
    choice; one where rows in a batch would change each other."""
    config = loaded.model.config.get_text_config()
    longest = max((len(row.prompt) + row.most for row in rows), default=0)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {one.get("rope_type") for one in (rope, *rope.values()) if isinstance(one, dict)}
    trained = rope.get("original_max_position_embeddings") or context_length(loaded.model)
    if not supports_padding(loaded.model) or (kinds & set(_BATCH_DEPENDENT_ROPE) and longest > trained):
        return 1
    if may_exceed_memory or len(rows) < 2:
        return max(1, len(rows))
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    number = loaded.model.dtype.itemsize
    row_bytes = int(longest * 2 * config.num_hidden_layers * heads * width * number + 16 * config.vocab_size)
    return max(1, _free_bytes(loaded.device) // 2 // row_bytes)


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def describe_cut(loaded: LoadedModel, completion: Completion, params: SamplingParams) -> str | None:
    """Why an answer ends before the model ended it; None where it did not."""
    if completion.finish_reason != "length":
        return None
    if completion.tokens < params.max_tokens:
        context = context_length(loaded.model)
        return f"cut after {completion.tokens:,} tokens: prompt and answer fill the model's context of {context:,}"
    return f"cut after {completion.tokens:,} tokens; for more: --max-tokens {2 * params.max_tokens}"
