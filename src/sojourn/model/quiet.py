"""transformers without its progress bars and advice, which are for notebooks."""


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
