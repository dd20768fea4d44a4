"""What a GGUF file says of itself: name, size, origin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sojourn.export.gguf.vocabulary import AddedToken

if TYPE_CHECKING:
    from gguf import GGUFWriter

_PHI3 = re.compile(r"phi-?3", re.IGNORECASE)
_PHI3_TOKENS = ("<unk>", "<s>", "</s>", "<|endoftext|>")


def add_general(
    writer: GGUFWriter, name: str, parameters: int, lineage: dict[str, Any], added: list[AddedToken]
) -> None:
    from gguf import size_label

    writer.add_name(_name(name, added))
    writer.add_size_label(size_label(parameters, parameters, 0, 0))
    license_ = lineage.get("license")
    if isinstance(license_, str):
        writer.add_license(license_)
    base = lineage.get("base")
    if isinstance(base, str) and base and base != name:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base.split("/")[-1])


def _name(name: str, added: list[AddedToken]) -> str:
    """llama.cpp drops the space after special tokens where a model is called phi-3, and only there."""
    texts = {token.text for token in added}
    strips = any(token.rstrip for token in added) and texts.issuperset(_PHI3_TOKENS)
    if strips and _PHI3.search(name) is None:
        return f"{name} (Phi-3)"
    return name if strips else _PHI3.sub("Phi 3", name)
