"""The Modelfile by which Ollama takes over a GGUF file: chat template in Go's syntax, stop tokens, context."""

from __future__ import annotations

import json

from sojourn.export.gguf.turns import Turns, find_turns
from sojourn.infer.gguf.file import GgufFile
from sojourn.infer.gguf.tokenizer import STOPS_BY_TEXT, special_names

MOST_CONTEXT = 8192  # Ollama reserves memory for all of it


def modelfile(file: GgufFile) -> str:
    context = int(file["{arch}.context_length"])
    lines = [f"FROM ./{file.path.name}"]
    if context > MOST_CONTEXT:
        lines.append(f"# The model's context is {context}; a larger num_ctx takes more memory.")
    lines.append(f"PARAMETER num_ctx {min(context, MOST_CONTEXT)}")
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in _stop_texts(file)]
    return "\n".join([*lines, *_template(file)]) + "\n"


def _stop_texts(file: GgufFile) -> list[str]:
    """End of text and end of turn; and what llama.cpp stops at by its text, where the chat template writes it."""
    names, template = special_names(file.metadata), str(file["tokenizer.chat_template"] or "")
    tokens = set(file["tokenizer.ggml.tokens"])
    written = [text for text in sorted(STOPS_BY_TEXT) if text in template and text in tokens]
    named = [names.get(f"{name}_token", "") for name in ("eos", "eot", "eom")]
    return [text for text in dict.fromkeys([*named, *written]) if text]


def _template(file: GgufFile) -> list[str]:
    template, names = file["tokenizer.chat_template"], special_names(file.metadata)
    bos = names.get("bos_token", "") if file["tokenizer.ggml.add_bos_token"] else ""  # Ollama adds it itself
    turns = find_turns(template, names, bos) if isinstance(template, str) else None
    if turns is None or '"""' in f"{turns}":
        known = "# Ollama compares the chat template in the file with those it knows; for another one, add TEMPLATE."
        return [known] if template else ['TEMPLATE """{{ .Prompt }}"""']
    lines = [f'TEMPLATE """{_go_template(turns, turns.begin.removeprefix(bos))}"""']
    if turns.system is not None:
        lines.append(f'SYSTEM """{turns.system}"""')
    return lines


def _go_template(turns: Turns, begin: str) -> str:
    branches = []
    for role, (before, after) in turns.around.items():
        branches.append(f'if eq .Role "{role}" }}}}{_literal(before)}{{{{ .Content }}}}{_literal(after)}')
    roles = "{{ else ".join(branches)
    return f"{_literal(begin)}{{{{ range .Messages }}}}{{{{ {roles}{{{{ end }}}}{{{{ end }}}}{_literal(turns.ask)}"


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')
