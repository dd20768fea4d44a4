"""Reads the beginning of each source: its format, its first documents, and the chat template for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from sojourn.config.data import DataConfig
from sojourn.data.inputs import Inputs
from sojourn.data.report import format_names, format_sample
from sojourn.data.sources.chunks import Chunk, parse_chunk
from sojourn.data.sources.document import Document
from sojourn.data.sources.texts import SPLIT_TEXT
from sojourn.data.tokenize.chat_template import Template
from sojourn.data.tokenize.templates import END_OF_TEXT, NAMED, named_template, read_template_file
from sojourn.data.tokenize.tokenizer import TokenizerBundle, special_tokens
from sojourn.errors import UserError

_MAX_DOCUMENTS = 3  # of each part
_MAX_PARTS = 50
_KINDS = {"documents": "built in", "text": f"text (documents end at {SPLIT_TEXT})"}


@dataclass(frozen=True)
class Preview:
    """`formats` are (name, format) of each source part, `documents` the first of each; `template_error` is why there is
    no template, if so; `converted` are the files that are not UTF-8."""

    formats: list[tuple[str, str]]
    documents: list[Document]
    pairs: bool
    template: Template | None
    template_error: str
    converted: list[str]


def make_preview(inputs: Inputs) -> Preview:
    data = inputs.data
    template, template_error = open_template(data, inputs.tokenizer)
    formats: list[tuple[str, str]] = []
    documents: list[Document] = []
    for opened in inputs.sources:
        for part in opened.parts[:_MAX_PARTS]:
            name, first = _read_beginning(opened.part_chunks(part), data.on_bad == "fail")
            formats.append((part.name, name))
            documents += first
        if len(opened.parts) > _MAX_PARTS:
            more = len(opened.parts) - _MAX_PARTS
            formats.append((f"and {more:,} more of {opened.source.path}", "not read yet"))
    if template is None and any(d.is_chat for d in documents):
        raise UserError(template_error)
    pairs = {bool(d.rejected) for d in documents}
    if len(pairs) == 2:
        raise UserError("data.sources: preference pairs mixed with other documents; prepare each kind in its own run")
    formats += [(sample["path"], format_sample(sample)) for sample in inputs.samples()]
    parts = [part for opened in (*inputs.sources, *inputs.eval_sources) for part in opened.parts]
    converted = [part.name for part in parts if part.needs_conversion()]
    if converted:
        formats.append((f"converted from {data.encoding}", format_names(converted)))
    return Preview(formats, documents, pairs == {True}, template, template_error, converted)


def _read_beginning(chunks: Iterator[Chunk], fail: bool) -> tuple[str, list[Document]]:
    """The format of a part and its first documents; gives up after four chunks of bad records."""
    name = "empty"
    for chunk in islice(chunks, 4):
        name = chunk.format or _KINDS.get(chunk.kind, "no readable record")
        parsed = parse_chunk(chunk)
        name += f" (columns not used: {format_names(parsed.unused)})" if parsed.unused else ""
        if parsed.documents:
            return name, parsed.documents[:_MAX_DOCUMENTS]
        if parsed.bad and fail:
            raise UserError(f"{parsed.bad[0][0]}: {parsed.bad[0][1]}")
    return name, []


def open_template(data: DataConfig, tokenizer: TokenizerBundle | None) -> tuple[Template | None, str]:
    if tokenizer is None:
        return _template_for_new_tokenizer(data), ""
    try:
        return tokenizer.template(data.template), ""
    except UserError as error:
        return None, str(error)


def _template_for_new_tokenizer(data: DataConfig) -> Template:
    """The tokenizer is yet to be trained; its vocabulary will have the template's special tokens."""
    name, tokens = data.template.replace("auto", "chatml"), special_tokens(data)
    if name in NAMED:
        return Template(named_template(name, END_OF_TEXT), {"eos_token": END_OF_TEXT}, tokens)
    template = Template(read_template_file(name), {"eos_token": END_OF_TEXT}, tokens)
    template.check(tokens.__contains__, name)
    return template
