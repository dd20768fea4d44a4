"""Silences progress bars and warnings of transformers, bitsandbytes and torchao; downloads keep their progress bars."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any


def quiet_transformers() -> None:
    import logging as standard

    # before transformers imports torchao, which lists the GPU kernels that do not load here
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        if (logger := standard.getLogger(name)).level != standard.ERROR:  # to set a level takes milliseconds
            logger.setLevel(standard.ERROR)
    from huggingface_hub import utils
    from transformers.utils import logging

    logging.disable_progress_bar()
    if logging.get_verbosity() != standard.ERROR:
        logging.set_verbosity_error()
    if sys.stderr.isatty():
        hub: Any = utils
        hub.enable_progress_bars()


@contextlib.contextmanager
def suppress_stderr(suppress: bool) -> Iterator[None]:
    """For libraries that draw progress bars without a switch to disable them."""
    with contextlib.redirect_stderr(io.StringIO()) if suppress else contextlib.nullcontext():
        yield
