"""The types of configuration fields: allowed values, and how they are parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sojourn.config.quantities import Count, Money


@dataclass(frozen=True)
class Description:
    """The allowed values in words, for error messages; replaces what the type alone would say."""

    text: str


def _parse_whole_number(value: Any) -> Any:
    """Accepts `1e3` and `8.0` as whole numbers."""
    return int(value) if isinstance(value, float) and abs(value) < 1e15 and value == int(value) else value


def _parse_bool(value: Any) -> Any:
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _parse_switch(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


def _parse_checkpointing(value: Any) -> Any:
    return ("full" if value else "off") if isinstance(value, bool) else value


def _split_commas(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _parse_sources(value: Any) -> Any:
    value = [value] if isinstance(value, (str, dict)) else value
    return [{"path": v} if isinstance(v, str) else v for v in value] if isinstance(value, list) else value


def parse_gpus(value: Any) -> Any:
    """`0`, `0,1` and `[0, 1]` as a list of indices; `auto` and `all` unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, str) and value not in ("auto", "all"):
        parts = [part.strip() for part in value.split(",")]
        return [int(part) if re.fullmatch(r"[0-9]{1,6}", part) else part for part in parts]
    return value


def _strip_per_hour(value: Any) -> Any:
    return re.sub(r"\s*/\s*(h|hr|hour|小时|时)\s*$", "", value) if isinstance(value, str) else value


WholeNumber = BeforeValidator(_parse_whole_number)
Auto = Literal["auto"]
Bool = Annotated[bool, BeforeValidator(_parse_bool)]
Rows = Annotated[int, WholeNumber, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, WholeNumber, Field(ge=1, le=1_000_000_000)]
Heads = Annotated[int, WholeNumber, Field(ge=1, le=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveCount = Annotated[Count, Field(ge=1)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_parse_switch)]
OnOff = Annotated[Literal["on", "off"], BeforeValidator(_parse_switch)]
ActivationCheckpointing = Annotated[
    Literal["auto", "off", "selective", "full", "offload"], BeforeValidator(_parse_checkpointing)
]
Price = Annotated[Money, BeforeValidator(_strip_per_hour)]
Name = Annotated[
    str,
    Field(min_length=1, max_length=100, pattern=r"^\w[\w.\-]*$"),
    Description("a name of letters, digits, “-”, “_” and “.”, 100 at most"),
]
Text = Annotated[
    str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$"), Description("text (one line, not empty)")
]
TextList = Annotated[
    list[Text], BeforeValidator(_split_commas), Description("a list of names, such as [q_proj, v_proj]")
]
Prompts = Annotated[list[Text], BeforeValidator(_to_list), Description("a prompt, or a list of prompts")]
CommaList = BeforeValidator(_split_commas)
Sources = BeforeValidator(_parse_sources)
Gpus = Annotated[
    list[Annotated[int, Field(ge=0, le=1023)]] | Literal["auto", "all"],
    BeforeValidator(parse_gpus),
    Description("GPU numbers such as 0 or 0,1, or all, or auto"),
]


def conflict(key: str, message: str, *others: str) -> PydanticCustomError:
    """An error about `key`, which conflicts with the `others` (all relative to the section)."""
    return PydanticCustomError("conflict", "{message}", {"keys": (key, *others), "message": message})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
