"""The tokenizer inside a GGUF file, extracted once into a folder of the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from sojourn.errors import UserError


def extract_tokenizer(file: Path) -> Path:
    """The folder with the tokenizer that transformers rebuilds from the file's vocabulary, merges and template."""
    if find_spec("gguf") is None or find_spec("torch") is None:
        raise UserError("data.tokenizer: a GGUF file needs the packages gguf and torch; run: pip install gguf torch")
    from platformdirs import user_cache_path

    stat = file.stat()
    name = hashlib.sha256(f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = user_cache_path("sojourn") / "tokenizers" / name
    if (folder / "tokenizer.json").is_file():
        return folder
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    stage = folder.with_name(f".{name}-{os.getpid()}")
    try:
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(stage)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        shutil.rmtree(stage, ignore_errors=True)
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"data.tokenizer: {file}: its tokenizer cannot be read: {reason}") from None
    if not (folder / "tokenizer.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        stage.rename(folder)
    return folder
