"""Silences progress bars and warnings of transformers and bitsandbytes; downloads keep their progress bars."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any


def quiet_transformers() -> None:
    import logging as standard

    from huggingface_hub import utils
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if sys.stderr.isatty():
        hub: Any = utils
        hub.enable_progress_bars()
    standard.getLogger("bitsandbytes").setLevel(standard.ERROR)


@contextlib.contextmanager
def suppress_stderr(suppress: bool) -> Iterator[None]:
    """For libraries that draw progress bars without a switch to disable them."""
    with contextlib.redirect_stderr(io.StringIO()) if suppress else contextlib.nullcontext():
        yield
