"""ChatML: how a conversation becomes text, and which characters of it are the assistant's own."""

from __future__ import annotations

from sojourn.data.document import Message

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

Span = tuple[int, int]

# The same rendering in Jinja, for every program that opens the tokenizer; the generation marks give trainers the mask.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(messages: tuple[Message, ...]) -> tuple[str, list[Span]]:
    """The text of a chat, and the spans of the assistant's words with their end-of-turn marks."""
    text, spans = "", []
    for message in messages:
        text += f"{TURN_START}{message.role}\n"
        start = len(text)
        text += f"{message.content}{TURN_END}"
        if message.role == "assistant":
            spans.append((start, len(text)))
        text += "\n"
    return text, spans
