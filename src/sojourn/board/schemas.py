"""The bodies of requests. What is not listed here is refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Text = Annotated[str, Field(max_length=1000)]
Scalar = StrictBool | StrictInt | StrictFloat | StrictStr
Key = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*$", max_length=100)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Form(_Body):
    """A run: a preset and settings by their keys. `host`: where it is started; here without one. `preview`: starts
    nothing, answers the line."""

    preset: Text | None = None
    settings: Annotated[dict[Key, Scalar | list[Scalar] | None], Field(max_length=200)] = {}
    gpu: Annotated[list[Text], Field(max_length=50)] = []
    platform: Text | None = None
    budget: Text | None = None
    deadline: Text | None = None
    host: Text | None = None
    preview: StrictBool = False


class Action(_Body):
    """`checkpoint`: a step, `best` or `final`. `beside`: another model, for `chat`. `preview`: starts nothing, answers
    the line."""

    checkpoint: StrictInt | Text | None = None
    to: Text | None = None
    what: Text | None = None
    quantize: Text | None = None
    beside: Text | None = None
    preview: StrictBool = False


class Tags(_Body):
    tags: Annotated[list[Text], Field(max_length=100)]
