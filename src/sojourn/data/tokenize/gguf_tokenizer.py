"""The tokenizer inside a GGUF file, extracted once into a folder of the user's cache."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sojourn.data.tokenize.gguf_pre_tokenizers import BPE_MODEL, set_pre_tokenizer
from sojourn.errors import UserError
from sojourn.storage.gguf_cache import GgufCache
from sojourn.storage.gguf_header import check_gguf

_BYTES = 1 << 19  # small files: no line about them


def extract_tokenizer(file: Path) -> Path:
    """The folder with the tokenizer that transformers rebuilds from the file's vocabulary, merges and template."""
    if find_spec("gguf") is None or find_spec("torch") is None:
        raise UserError("data.tokenizer: a GGUF file needs the packages gguf and torch; run: pip install gguf torch")
    values = check_gguf(file, weights=False).values
    cache = GgufCache(file, "data.tokenizer")
    found = cache.find("tokenizer")
    if found is not None:
        if (found / "tokenizer.json").is_file():
            return found
        cache.drop(found)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # gguf, tokenizers and transformers raise anything for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"data.tokenizer: {file}: its tokenizer cannot be read: {reason}") from None
    pre = values.get("tokenizer.ggml.pre")
    if pre is not None and values.get("tokenizer.ggml.model") == BPE_MODEL:
        set_pre_tokenizer(tokenizer.backend_tokenizer, str(pre), file)
    kept = cache.keep("tokenizer", _BYTES, tokenizer.save_pretrained)
    if kept is not None:
        return kept
    folder = Path(tempfile.mkdtemp(prefix="sojourn-"))  # for this process
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    return folder
