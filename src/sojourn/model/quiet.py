"""transformers and bitsandbytes without their bars and advice; only downloads, which may take long, still show one."""

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
def no_bars(wanted: bool) -> Iterator[None]:
    """Where a library draws bars that it has no switch for."""
    with contextlib.redirect_stderr(io.StringIO()) if wanted else contextlib.nullcontext():
        yield
