"""`sojourn generate` over many prompts: one JSON record a completion, in the order of the prompts, printed or appended
to a file that a kill does not damage."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sojourn.data.sources.values import BadRecord
from sojourn.errors import UserError
from sojourn.expand_user import expand_user
from sojourn.infer.completions_file import CompletionsFile
from sojourn.infer.generate import Completion, Generator, Prompt, draw_seed
from sojourn.infer.load import LoadedModel
from sojourn.infer.progress import Progress
from sojourn.infer.prompt_file import PromptRow, check_prompt_file, read_prompts
from sojourn.infer.prompts import PromptEncoder
from sojourn.infer.sampling import SamplingParams
from sojourn.run.output import print_json
from sojourn.storage.files import sha256

_SAVE_SECONDS = 1.0
_ENDS = 1 << 16  # bytes at both ends of a weights file that identify it
_RESERVED = ("sample", "completion", "finish_reason", "prompt_tokens", "tokens", "error")


@dataclass(frozen=True)
class RowsJob:
    """`read`: the prompts, from the first one each time. `source`: what identifies them. `raw`: without the chat
    template."""

    read: Callable[[], Iterator[PromptRow]]
    source: str
    params: SamplingParams
    raw: bool = False
    batch_size: int | None = None

    def settings(self, loaded: LoadedModel, name: str) -> dict[str, Any]:
        """Everything that decides the output."""
        params = {**asdict(self.params), "logit_bias": {str(k): v for k, v in self.params.logit_bias.items()}}
        params["stop"] = list(self.params.stop)
        if not self.params.temperature:
            params["seed"] = 0  # greedy decoding draws nothing
        return {"model": name, "weights": weights_stamp(loaded.path), "prompts": self.source, "raw": self.raw, **params}


def rows_of(
    texts: Sequence[str] | None, file: str | None, out: str | None
) -> tuple[Callable[[], Iterator[PromptRow]], str]:
    """The prompts of a command line: how to read them, and what identifies them."""
    if file is None:
        given = list(texts or ())
        digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()
        return lambda: (PromptRow(i, f"--prompt {i + 1}", {"prompt": t}, t) for i, t in enumerate(given)), digest[:16]
    path = check_prompt_file(file)
    if out is not None and expand_user(out).exists() and path.samefile(expand_user(out)):
        raise UserError(f"--out: {out} is the file of prompts; choose another name")
    return lambda: read_prompts(path), sha256(path)[:16]


def check_rows(rows: Iterator[PromptRow]) -> int:
    """How many there are. Raises UserError at the first that is no prompt, and where an output column would be lost."""
    count = 0
    for row in rows:
        count += 1
        _kept_columns(row)
    return count


def complete(generator: Generator, job: RowsJob) -> tuple[list[Completion], list[dict[str, Any]]]:
    """A few prompts at once: completions, and output rows. A prompt that cannot be answered is an error."""
    asked = list(_ask(generator, job))
    for one in asked:
        if one.reason is not None:
            text = " ".join(one.row.text.split())[:40]
            which = f"the prompt “{text}…”" if len(asked) > 1 else "the prompt"
            raise UserError(f"{which}: {one.reason}")
    made = list(generator([one.prompt for one in asked if one.prompt is not None], job.params))
    return made, [one.output(job.params, completion) for one, completion in zip(asked, made, strict=True)]


def print_rows(loaded: LoadedModel, job: RowsJob, total: int) -> None:
    """To standard output."""
    progress = Progress("completions", total * job.params.n)
    for row in _generate(Generator(loaded, job.batch_size), job, 0, progress):
        print_json(row)
    progress.say(progress.summary())


def write_rows(loaded: LoadedModel, job: RowsJob, total: int, name: str, out: Path, overwrite: bool) -> None:
    """To a file; rows that it has already are not made again."""
    total *= job.params.n
    file = CompletionsFile(out, job.settings(loaded, name), total, overwrite, draw_seed)
    made: list[dict[str, Any]] = []
    try:
        if file.done >= total:
            print(f"{out}: complete already ({total:,} completions)", file=sys.stderr)
            return
        if file.done:
            print(f"{out}: going on after {file.done:,} of {total:,} completions", file=sys.stderr)
        job = replace(job, params=replace(job.params, seed=file.settings["seed"]))
        progress, generator = Progress("completions", total, file.done), Generator(loaded, job.batch_size)
        saved = time.monotonic()
        for row in _generate(generator, job, file.done, progress):
            made.append(row)
            if len(made) >= generator.batch_size or time.monotonic() - saved > _SAVE_SECONDS:
                file.append(made)
                made, saved = [], time.monotonic()
        file.append(made)
        progress.say(f"{out}: {progress.summary()}")
    except KeyboardInterrupt:
        print(f"\n{out}: {file.done:,} of {total:,} completions; run the same command to go on", file=sys.stderr)
        raise
    finally:
        file.close()


def _generate(generator: Generator, job: RowsJob, done: int, progress: Progress) -> Iterator[dict[str, Any]]:
    """The output rows after the first `done`, in order."""
    asked, failed = deque[_Asked](), 0

    def prompts() -> Iterator[Prompt]:
        for one in islice(_ask(generator, job), done, None):
            asked.append(one)
            if one.prompt is not None:
                yield one.prompt

    for completion in chain(generator(prompts(), job.params, progress.add_tokens), (None,)):
        while asked and asked[0].prompt is None:
            failed += 1
            progress.add_row()
            yield asked.popleft().output(job.params)
        if completion is not None:
            progress.add_row()
            yield asked.popleft().output(job.params, completion)
    if failed:
        progress.say(f"warning: {failed:,} prompts have no completion; see the rows with finish_reason error")


@dataclass(frozen=True)
class _Asked:
    """`prompt`: None where it cannot be answered; `reason` says why."""

    row: PromptRow
    sample: int
    prompt: Prompt | None
    reason: str | None

    def output(self, params: SamplingParams, completion: Completion | None = None) -> dict[str, Any]:
        kept = {**_kept_columns(self.row), **({"sample": self.sample} if params.n > 1 else {})}
        if completion is None:
            return {**kept, "completion": "", "finish_reason": "error", "error": self.reason}
        facts = asdict(completion)
        return {**kept, "completion": facts.pop("text"), **facts}


def _ask(generator: Generator, job: RowsJob) -> Iterator[_Asked]:
    encoder = PromptEncoder(generator.loaded.tokenizer)
    for row in job.read():
        ids: Sequence[int] = ()
        try:
            ids = row.encode(encoder, job.raw)
            reason = generator.check(ids)
        except BadRecord as error:
            reason = str(error)
        for sample in range(job.params.n):
            yield _Asked(row, sample, Prompt(ids, row.index, sample) if reason is None else None, reason)


def _kept_columns(row: PromptRow) -> dict[str, Any]:
    """The record's columns; those with the name of one of ours as `input_NAME`."""
    kept = {f"input_{name}" if name in _RESERVED else name: value for name, value in row.columns.items()}
    if len(kept) < len(row.columns):
        taken = next(name for name in _RESERVED if name in row.columns and f"input_{name}" in row.columns)
        raise UserError(f"{row.where}: columns {taken} and input_{taken} would become one; rename one of them")
    return kept


def weights_stamp(path: Path) -> str:
    """A hash of a model's files: names, sizes, and both ends of each."""
    folder = [*path.glob("*.safetensors"), *path.glob("*config.json")] if path.is_dir() else [path]
    whole = hashlib.sha256()
    for file in sorted(folder):
        size = file.stat().st_size
        whole.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            whole.update(opened.read(_ENDS))
            opened.seek(max(0, size - _ENDS))
            whole.update(opened.read(_ENDS))
    return whole.hexdigest()[:16]
