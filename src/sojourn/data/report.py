"""What preparing tells the user, line by line: examples with the mask coloured, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sojourn.data.plots import histogram_text
from sojourn.data.tokenize.chat_template import Span

_GREEN, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_SHOWN = 700


def print_examples(
    say: Callable[[str], None], colour: bool, formats: list[tuple[str, str]], examples: Sequence[Mapping[str, Any]]
) -> None:
    """Each source's format, then the examples; what the model learns to say is green and between ‹ and ›."""
    for line in _example_lines(formats, examples, colour):
        say(line)


def _example_lines(
    formats: list[tuple[str, str]], examples: Sequence[Mapping[str, Any]], colour: bool
) -> Iterator[str]:
    for name, kind in formats:
        yield f"{name}: {kind}"
    if examples:
        green, plain = (_GREEN, _PLAIN) if colour else ("", "")
        yield f"the model will see this, and learn to say what is {green}‹marked›{plain}:"
    for example in examples:
        dim, plain = (_DIM, _PLAIN) if colour else ("", "")
        yield f"  {dim}{example['where']}{plain}  {_marked(example['text'], example['spans'], colour)}"


def _marked(text: str, spans: list[Span], colour: bool) -> str:
    """The text with its trained spans marked; the middle of what is very long is left out."""
    green, plain = (_GREEN, _PLAIN) if colour else ("", "")
    parts, place = [], 0
    for start, end in spans:
        parts += [_short(text[place:start]), f"{green}‹{_short(text[start:end])}›{plain}"]
        place = end
    return "".join([*parts, _short(text[place:])])


def _short(text: str) -> str:
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]} […] {text[-_SHOWN // 2 :]}"
    return "".join(_visible(letter) for letter in text)


def _visible(letter: str) -> str:
    return {"\n": "⏎", "\t": "⇥"}.get(letter, letter if letter.isprintable() else f"\\x{ord(letter):02x}")


def format_report(report: Mapping[str, Any], global_batch: int | None = None) -> Iterator[str]:
    """The report in words."""
    for split in ("train", "eval"):
        facts = report[split]
        if facts["documents"]:
            yield _split_line(split, facts, report["max_length"])
    train = report["train"]
    if global_batch and train["rows"]:
        yield f"an epoch is {-(-train['rows'] // global_batch):,} steps of {global_batch:,} rows"
    yield from _cut_lines(train, report["max_length"])
    if report["damaged"]:
        yield f"damaged and left out: {report['damaged']:,} of {report['records']:,} records"
        yield from (f"  {where}: {why}" for where, why in report["damaged_examples"][:5])
    left = {**report["left_out"], "near duplicates": report["near_duplicates"]}
    words = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in left.items() if count)
    if words:
        yield f"left out as you asked: {words}"
    if report["duplicates"]:
        yield f"exact duplicates: {report['duplicates']:,} (leave them out with data.clean.duplicates=exact)"
    if report["special_token_texts"]:
        yield f"the text of a special token stands in {report['special_token_texts']:,} documents: read as plain words"
    if report["languages"]:
        yield "languages: " + ", ".join(f"{code} {share:.0%}" for code, share in list(report["languages"].items())[:8])
    yield from _compression_lines(report.get("compression") or [])
    yield "lengths in tokens:"
    yield from (f"  {line}" for line in histogram_text(train["lengths"]))


def _split_line(name: str, facts: Mapping[str, Any], max_length: int) -> str:
    kind = "pairs" if facts["pairs"] else "documents"
    wide = 2 * max_length if facts["pairs"] else max_length
    ratio = f", {facts['bytes'] / facts['tokens']:.2f} bytes a token" if facts["tokens"] else ""
    return (
        f"{name}: {facts['documents']:,} {kind}, {facts['tokens']:,} tokens ({facts['trained_tokens']:,} trained on), "
        f"{facts['rows']:,} rows of {wide} ({facts['fill']:.1%} full){ratio}"
    )


def _cut_lines(facts: Mapping[str, Any], max_length: int) -> Iterator[str]:
    words = {
        "split_documents": "texts split", "truncated_texts": "texts cut", "truncated_chats": "chats cut",
        "dropped_texts": "texts left out", "dropped_chats": "chats left out",
    }  # fmt: skip
    told = [f"{facts[key]:,} {word}" for key, word in words.items() if facts[key]]
    if told:
        yield f"longer than {max_length} tokens: {', '.join(told)} (raise data.max_length to keep them whole)"


def _compression_lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        yield "bytes a token, by vocabulary size:"
    for row in rows:
        kinds = ", ".join(f"{key} {value:.2f}" for key, value in row.items() if key != "vocab_size")
        yield f"  {row['vocab_size']:,}: {kinds}"
