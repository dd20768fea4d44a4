"""The bodies of requests. A field that is not here is an error: nothing that a client asks for is ignored.

Values are not coerced ("1" is no number). Fields that OpenAI's API has and this server cannot honour are accepted only
with the value that changes nothing (`_HARMLESS`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1000
MOST_TOP_LOGPROBS = 20
MOST_PROMPTS = 1024
MOST_TOOLS = 128
_INT64 = 2**63 - 1

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "store": (False,), "service_tier": ("auto", "default"), "modalities": (["text"],), "suffix": ("",),
    "truncation": ("disabled",), "background": (False,), "include": ([],), "functions": ([],),
    "use_beam_search": (False,), "min_tokens": (0,), "best_of": (1,),
}  # fmt: skip

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MOST_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Request(Body):
    """What all requests have."""

    model: Name
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT64, description="0 or -1: all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=-_INT64 - 1, le=_INT64)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = Field(None, description="For the log only.")

    @model_validator(mode="before")
    @classmethod
    def _without_harmless(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        return {key: value for key, value in given.items() if key in known or not _is_harmless(key, value)}

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, value in (bias or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError(f"{token[:20]!r} is not a token id")
            if abs(value) > 100:
                raise ValueError(f"token {token}: from -100 to 100, not {value:g}")
        if len(bias or {}) > 4096:
            raise ValueError("at most 4,096 tokens")
        return bias

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _is_harmless(key: str, value: Any) -> bool:
    return value is None or value in _HARMLESS.get(key, ())


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionRef(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionRef


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class CalledFunction(Body):
    name: FunctionName
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


Content = str | list[TextPart]


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(Body):
    role: Literal["user"]
    content: Content


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = Field(None, description="The function's, which tool_call_id tells, too.")


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatRequest(Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1, le=_INT64)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect: prefixes are shared anyway.")


Prompt = str | list[str] | list[TokenId] | list[list[TokenId]]


class CompletionRequest(Request):
    prompt: Prompt
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=0, le=_INT64, description="Default: 16. 0 needs echo.")
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @field_validator("prompt")
    @classmethod
    def _some(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and not prompt:
            raise ValueError("it is an empty list")
        if isinstance(prompt, list) and not isinstance(prompt[0], int) and len(prompt) > MOST_PROMPTS:
            raise ValueError(f"at most {MOST_PROMPTS:,} prompts")
        return prompt


class ResponsesTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(Body):
    type: Literal["function"]
    name: FunctionName


class ResponsesSchemaFormat(Body):
    type: Literal["json_schema"]
    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None = None


class InputMessage(Body):
    """`id` and `status`: of an answer that a client sends back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ResponsesRequest(Request):
    input: str | Annotated[list[InputMessage | FunctionCallItem | FunctionOutputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_INT64)
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    text: TextSettings | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, description="Given back with the answer.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect: prefixes are shared anyway.")


PathText = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


class LoadAdapter(Body):
    """`base_model_name`: the served model that it belongs to; default: the first."""

    lora_name: Name
    lora_path: PathText
    base_model_name: Name | None = None


class UnloadAdapter(Body):
    lora_name: Name


class Reload(Body):
    """`name`: of the served model that gets other weights; default: the first. `model`: a run's name, or the folder of
    a model or a checkpoint; default: what the server was started with, whose newest checkpoint may be another one by
    now."""

    name: Name | None = None
    model: PathText | None = None
    checkpoint: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None


class Feedback(Body):
    """`kind` `none` withdraws what was said under `id`."""

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{8,64}$")]
    kind: Literal["like", "dislike", "correction", "preference", "none"]
    model: Name | None = None
    prompt: list[ChatMessage] = []
    chosen: AssistantMessage | None = None
    rejected: AssistantMessage | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
