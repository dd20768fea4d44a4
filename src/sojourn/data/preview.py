"""A first look at the sources: their formats and three examples as the model will see them, before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from sojourn.config.data import DataConfig
from sojourn.data.inputs import Inputs
from sojourn.data.sources.chunks import parse_chunk
from sojourn.data.sources.document import Document
from sojourn.data.sources.formats import BadRecord
from sojourn.data.sources.source import SourcePart, read_chunks
from sojourn.data.tokenize.chat_template import Span, Template
from sojourn.data.tokenize.templates import END_OF_TEXT, NAMED, named_template
from sojourn.data.tokenize.tokenizer import TokenizerBundle, checked, special_tokens, template_file
from sojourn.errors import UserError

EXAMPLES = 3
_KEPT = 20_000  # letters of an example in a report: some texts are as long as a book
_PARTS = 50


@dataclass(frozen=True)
class Example:
    """A document as text; `spans` are what the model learns to say."""

    where: str
    text: str
    spans: list[Span]

    def beginning(self) -> Example:
        """As much as a report keeps."""
        inside = [(start, min(end, _KEPT)) for start, end in self.spans if start < _KEPT]
        return Example(self.where, self.text[:_KEPT], inside)


@dataclass(frozen=True)
class Preview:
    """`formats` of each source by name; `refusal` says why there is no template, should a chat come later."""

    formats: list[tuple[str, str]]
    examples: list[Example]
    pairs: bool
    template: Template | None
    refusal: str


def make_preview(inputs: Inputs) -> Preview:
    """Reads the beginning of each source."""
    data = inputs.data
    template, refusal = _template(data, inputs.words)
    formats: list[tuple[str, str]] = []
    firsts: list[Document] = []
    for opened in inputs.sources:
        for part in opened.parts[:_PARTS]:
            name, documents = _beginning(part, opened.columns, data.on_bad == "fail")
            formats.append((part.name, name))
            firsts += documents
        if len(opened.parts) > _PARTS:
            formats.append((f"and {len(opened.parts) - _PARTS:,} more of {opened.source.path}", "not looked into yet"))
    if template is None and any(d.is_chat for d in firsts):
        raise UserError(refusal)
    pairs = {bool(d.rejected) for d in firsts}
    if len(pairs) == 2:
        raise UserError("data.sources: preference pairs and other documents; prepare them apart, each for its own run")
    examples = [example for document in firsts for example in _shown(document, template, data.train_on)]
    return Preview(formats, examples[:EXAMPLES], pairs == {True}, template, refusal)


def _beginning(part: SourcePart, columns: dict[str, str], fail: bool) -> tuple[str, list[Document]]:
    """The format of a part, and its first documents; a part that begins with nothing but damage is not read on."""
    name = "empty"
    for chunk in islice(read_chunks(part, columns), 4):
        name = chunk.format or {"documents": "built in", "text": "text"}.get(chunk.kind, "nothing that can be read")
        documents, _, bad = parse_chunk(chunk)
        if documents:
            return name, documents[:EXAMPLES]
        if bad and fail:
            raise UserError(f"{bad[0][0]}: {bad[0][1]}")
    return name, []


def _template(data: DataConfig, words: TokenizerBundle | None) -> tuple[Template | None, str]:
    if words is None:
        return new_template(data), ""
    try:
        return words.template(data.template), ""
    except UserError as error:
        return None, str(error)


def new_template(data: DataConfig) -> Template:
    """The template for a tokenizer that is yet to be trained; its special tokens will be in the vocabulary."""
    name, tokens = data.template.replace("auto", "chatml"), special_tokens(data)
    if name in NAMED:
        return Template(named_template(name, END_OF_TEXT), {"eos_token": END_OF_TEXT}, tokens)
    return checked(Template(template_file(name), {"eos_token": END_OF_TEXT}, tokens), tokens.__contains__, name)


def _shown(document: Document, template: Template | None, train_on: str) -> Iterator[Example]:
    if not document.is_chat or template is None:
        yield Example(document.where, document.text, [(0, len(document.text))])
        return
    sides = (document.messages, document.rejected) if document.rejected else (document.messages,)
    for side, name in zip(sides, (" chosen", " rejected") if document.rejected else ("",), strict=True):
        with suppress(BadRecord):  # counted and told when all is read
            if train_on == "all" and not document.rejected:
                text = template.text(side, document.tools)
                yield Example(document.where, text, [(0, len(text))])
            else:
                last = train_on == "last" or bool(document.rejected)
                yield Example(document.where + name, *template.spans(side, document.tools, last))
