"""Renders a chat with the template of a transformers tokenizer, within the sandbox's limits: for generation, evaluation
and the parity gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sojourn.data.tokenize.template_sandbox import compile_template
from sojourn.errors import UserError


def render_template(
    source: str, special_names: dict[str, Any], messages: Any, tools: Any, add_generation_prompt: bool
) -> str:
    """Within the limits, as transformers renders it. Raises whatever the template does."""
    return compile_template(source, markers=False)(
        messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **special_names
    )


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """As transformers renders it, but for today's date, which is fixed."""
    given = list(tools) if tools else None
    try:
        source = tokenizer.get_chat_template(None, given)
        return render_template(source, tokenizer.special_tokens_map, list(messages), given, add_generation_prompt)
    except UserError as error:
        raise UserError(
            f"the model's chat template: {str(error).removeprefix('data.template: ')}; {_INSTEAD}"
        ) from None
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"the model's chat template rejects this chat: {reason}; {_INSTEAD}") from None


_INSTEAD = "take the template of the model's publisher, or give plain text: --raw"
