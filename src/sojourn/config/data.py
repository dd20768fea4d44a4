"""Data settings: sources, cleaning, tokenizer, packing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from sojourn.config.fields import (
    Auto,
    Description,
    Fraction,
    PositiveCount,
    Section,
    Sources,
    Text,
    TextList,
    WholeNumber,
    conflict,
)
from sojourn.config.quantities import Count, Size

_BYTES = 256
COMPRESSION_RATIO = 4  # size of text over the size of its compressed file, roughly


Encoding = Literal["utf-8", "gbk", "gb18030", "big5", "utf-16"]


class Tags(Section):
    """What messages call their keys and roles, where these names are not recognised."""

    role: Text | None = None
    content: Text | None = None
    user: Text | None = None
    assistant: Text | None = None
    observation: Text | None = None
    function_call: Text | None = None
    system: Text | None = None


class Columns(Section):
    """Which columns of a file to use, where their names are not recognised."""

    text: Text | None = None
    prompt: Text | None = None
    input: Text | None = None
    completion: Text | None = None
    system: Text | None = None
    history: Text | None = None
    messages: Text | None = None
    tools: Text | None = None
    chosen: Text | None = None
    rejected: Text | None = None
    label: Text | None = None
    reasoning: Text | None = None
    tags: Tags | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Columns:
        given = [key for key in type(self).model_fields if getattr(self, key) is not None]
        beside = {"input", "system", "history", "tools", "label", "reasoning", "tags"}
        whole = (
            {"text"},
            {"messages"},
            {"prompt", "completion"},
            {"prompt", "chosen", "rejected"},
            {"chosen", "rejected"},
        )
        main = set(given) - beside
        if given not in ([], ["tags"]) and main not in whole:
            ways = "; ".join(" and ".join(sorted(keys)) for keys in whole)
            also = "system, input, history, tools, label, reasoning, tags"
            raise conflict(given[0], f"{', '.join(given)} given; allowed together: {ways} (and {also})")
        return self


Take = Annotated[PositiveCount | None, BeforeValidator(lambda value: None if value == "all" else value)]


class Source(Section):
    """One source: files, a folder, a data set's name, or `builtin:NAME`."""

    path: Text
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    take: Take = None
    size: Annotated[Size, Field(ge=1)] | None = None
    config: Text | None = None
    split: Text | None = None
    revision: Text | None = None
    columns: Columns | None = None


_SOURCES = Description(
    "a file, a folder, a data set's name or builtin:NAME, or a list of them, each with path and optionally weight, "
    "take, size, columns, config, split or revision"
)


class CleanConfig(Section):
    """Filters; all off by default."""

    duplicates: Literal["keep", "exact", "near"] = "keep"
    similarity: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    min_characters: PositiveCount | None = None
    max_characters: PositiveCount | None = None
    languages: Annotated[TextList, Description("a list of language codes, such as [en, zh]")] = Field(default=[])

    @model_validator(mode="after")
    def _check_consistency(self) -> CleanConfig:
        shortest, longest = self.min_characters, self.max_characters
        if shortest is not None and longest is not None and shortest > longest:
            message = f"{shortest} given, but max_characters is {longest}: nothing would be left"
            raise conflict("min_characters", message, "max_characters")
        return self


_HELD_OUT = Description("a share of the documents from 0 up to 0.5, or a whole number of documents")


class DataConfig(Section):
    """Training and evaluation data."""

    sources: Annotated[list[Source], Sources, _SOURCES] = Field(default=[])
    eval_sources: Annotated[list[Source], Sources, _SOURCES] = Field(default=[])
    eval_fraction: Annotated[float, _HELD_OUT] = 0.01
    take: Take = None
    seed: Annotated[int, WholeNumber, Field(ge=0, le=2**63 - 1)] = 0
    columns: Columns = Columns()
    dataset_dir: Annotated[Text, Description("a folder with LLaMA-Factory's dataset_info.json")] | None = None
    encoding: Encoding = "utf-8"
    on_bad: Literal["fail", "skip"] = "fail"
    max_bad: Fraction = 0.001
    clean: CleanConfig = CleanConfig()
    tokenizer: Annotated[Text, Description("auto, bpe, sentencepiece, char, or the folder or file of a tokenizer")] = (
        "auto"
    )
    vocab_size: Annotated[Count, Field(ge=1, le=1_000_000)] = Count(8192)
    special_tokens: Annotated[TextList, Description("a list of tokens, such as [<think>, </think>]")] = Field(
        default=[]
    )
    template: Annotated[Text, Description("auto, chatml, llama3, plain, or a .jinja file")] = "auto"
    train_on: Literal["assistant", "last", "all"] = "assistant"
    max_length: Annotated[int, WholeNumber, Field(ge=8, le=10_000_000)] = 512
    packing: Literal["packed", "padded", "off"] = "packed"
    long_texts: Literal["split", "truncate", "drop"] = "split"
    long_chats: Literal["truncate", "drop"] = "truncate"
    workers: Annotated[int, WholeNumber, Field(ge=1, le=256)] | Auto = "auto"

    @property
    def eval_documents(self) -> int | None:
        """How many documents are held out, where `eval_fraction` is a number of them and not a share."""
        return int(self.eval_fraction) if self.eval_fraction >= 1 else None

    @model_validator(mode="after")
    def _check_consistency(self) -> DataConfig:
        share = self.eval_fraction
        if not (0 <= share <= 0.5 or (share >= 1 and share.is_integer())):
            raise conflict("eval_fraction", f"{share:g} given; allowed: {_HELD_OUT.text}")
        if self.eval_sources and self.eval_documents:
            message = f"{share:g} documents given, but data.eval_sources is the evaluation data; remove one of them"
            raise conflict("eval_fraction", message, "eval_sources")
        if self.vocab_size < _BYTES and self.tokenizer != "char":
            tail = "256 is a byte-level tokenizer; a token for each character: data.tokenizer=char"
            raise conflict("vocab_size", f"{self.vocab_size} given; allowed: from {_BYTES} up to 1,000,000 ({tail})")
        return self
