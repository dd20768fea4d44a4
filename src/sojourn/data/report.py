"""What `sojourn prepare` prints: examples with the trained spans marked, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sojourn.config.messages import printable
from sojourn.data.tokenize.chat_template import Span
from sojourn.plot.data_report import histogram_text

_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_MAX_CHARACTERS = 700
_MAX_NAMES = 20
_MAX_DUPLICATES, _DUPLICATE_CHARACTERS = 3, 80


def print_examples(
    say: Callable[[str], None], colour: bool, formats: list[tuple[str, str]], examples: Sequence[Mapping[str, Any]]
) -> None:
    """The format of each source, then the examples; what the model is trained on is green and between ‹ and ›."""
    green, dim, reset = (_GREEN, _DIM, _RESET) if colour else ("", "", "")
    for name, format in formats:
        say(f"{name}: {format}")
    if examples:
        say(f"examples as the model sees them; it is trained on what is {green}‹marked›{reset}:")
    for example in examples:
        say(f"  {dim}{example['where']}{reset}  {_mark_spans(example['text'], example['spans'], green, reset)}")


def _mark_spans(text: str, spans: list[Span], green: str, reset: str) -> str:
    parts, end_before = [], 0
    for start, end in spans:
        parts += [_printable(text[end_before:start]), f"{green}‹{_printable(text[start:end])}›{reset}"]
        end_before = end
    return "".join([*parts, _printable(text[end_before:])])


def _printable(text: str) -> str:
    """On one line; the middle of a very long text is left out."""
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS // 2]} […] {text[-_MAX_CHARACTERS // 2 :]}"
    visible = {"\n": "⏎", "\t": "⇥"}
    return "".join(visible.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def format_report(report: Mapping[str, Any], global_batch: int | None = None) -> Iterator[str]:
    """The report, line by line."""
    for split in ("train", "eval"):
        facts = report[split]
        if facts["documents"]:
            yield _format_split(split, facts, report["max_length"])
    if held_out := report.get("held_out"):
        yield f"held out: {held_out['documents']:,} of {held_out['of']:,} documents, seeded sample"
    yield from (f"{sample['path']}: {format_sample(sample)}" for sample in report.get("samples", []))
    yield from (f"{path}: {count:,} documents of text" for path, count in report.get("texts", {}).items())
    if converted := report.get("converted"):
        yield f"converted from {converted['encoding']}: {format_names(converted['files'])}"
    train = report["train"]
    if global_batch and train["rows"]:
        yield f"one epoch: {-(-train['rows'] // global_batch):,} steps of {global_batch:,} rows"
    yield from _format_too_long(train, report["max_length"])
    if report["damaged"]:
        yield f"bad records left out: {report['damaged']:,} of {report['records']:,}"
        yield from (f"  {where}: {reason}" for where, reason in report["damaged_examples"][:5])
    yield from _format_left_out({**report["left_out"], "near_duplicates": report["near_duplicates"]})
    for source in report.get("unused_columns", []):
        yield f"columns of {source['path']} that are not used: {format_names(source['columns'])}"
    if report["duplicates"]:
        yield f"exact duplicates: {report['duplicates']:,} documents (leave them out with data.clean.duplicates=exact)"
    for one in report.get("duplicate_examples", [])[:_MAX_DUPLICATES]:
        yield f"  {one['where'][0]}: {_printable(one['text'][:_DUPLICATE_CHARACTERS])}"
    if report["special_token_texts"]:
        yield f"documents with the text of a special token, read as plain text: {report['special_token_texts']:,}"
    if report.get("media_placeholders"):
        yield f"chats with <image>, <audio> or <video>, read as plain text: {report['media_placeholders']:,}"
    if report.get("unknown_tokens"):
        yield f"characters that the tokenizer does not have, read as unknown: {report['unknown_tokens']:,}"
    if report["languages"]:
        yield "languages: " + ", ".join(f"{code} {share:.0%}" for code, share in list(report["languages"].items())[:8])
    yield from _format_compression(report.get("compression") or [])
    yield "documents by length in tokens:"
    yield from (f"  {line}" for line in histogram_text(train["lengths"]))


def format_sample(sample: Mapping[str, Any]) -> str:
    documents, of, setting = sample["documents"], sample["of"], sample["setting"]
    return f"{documents:,} of {of:,} documents, seeded sample; {setting} takes them all"


def _format_left_out(left_out: Mapping[str, int]) -> Iterator[str]:
    marks = {"label_false": "label false (a bad answer)", "train_false": "train false", "weight_false": "weight 0"}
    for key, reason in marks.items():
        if left_out.get(key):
            yield f"left out: {left_out[key]:,} records with {reason}"
    counts = [f"{n:,} {key.replace('_', ' ')}" for key, n in left_out.items() if n and key not in marks]
    if counts:
        yield f"left out by data.clean: {', '.join(counts)}"


def format_names(given: Iterable[str]) -> str:
    """Columns or files."""
    names = [printable(name) for name in given]
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _format_split(name: str, facts: Mapping[str, Any], max_length: int) -> str:
    kind = "pairs" if facts["pairs"] else "documents"
    row_length = 2 * max_length if facts["pairs"] else max_length
    ratio = f", {facts['bytes'] / facts['tokens']:.2f} bytes/token" if facts["tokens"] else ""
    return (
        f"{name}: {facts['documents']:,} {kind}, {facts['tokens']:,} tokens ({facts['trained_tokens']:,} trained on), "
        f"{facts['rows']:,} rows of {row_length:,} tokens ({facts['fill']:.1%} full){ratio}"
    )


def _format_too_long(facts: Mapping[str, Any], max_length: int) -> Iterator[str]:
    names = {
        "split_documents": "texts split", "truncated_texts": "texts truncated", "truncated_chats": "chats truncated",
        "dropped_texts": "texts left out", "dropped_chats": "chats left out",
    }  # fmt: skip
    counts = [f"{facts[key]:,} {name}" for key, name in names.items() if facts[key]]
    if counts:
        yield f"longer than {max_length:,} tokens: {', '.join(counts)} (raise data.max_length to keep them whole)"


def _format_compression(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        yield "bytes per token by vocabulary size:"
    for row in rows:
        languages = ", ".join(f"{key} {value:.2f}" for key, value in row.items() if key != "vocab_size")
        yield f"  {row['vocab_size']:,}: {languages}"
