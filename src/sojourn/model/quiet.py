"""transformers and bitsandbytes without their progress bars and advice, which are for notebooks."""


def quiet_transformers() -> None:
    import logging as standard

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    standard.getLogger("bitsandbytes").setLevel(standard.ERROR)
