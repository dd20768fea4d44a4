"""The vocabulary of a new model is known once the data is prepared; a plan assumes `data.vocab_size`."""

from __future__ import annotations

from sojourn.config.messages import printable
from sojourn.config.schema import RunConfig
from sojourn.errors import UserError
from sojourn.plan.epoch import text_bytes

_BYTES_PER_ENTRY = 16  # text of which BPE finds all the entries asked for; WikiText-2 needs 12 for 8,192


def assumed_vocabulary(config: RunConfig) -> str | None:
    """What the plan assumes, where the run's vocabulary is likely to have another size."""
    data = config.data
    if config.model.base is not None:
        return None
    if data.tokenizer == "char":
        reason = "data.tokenizer=char has one for each character of the text"
    elif data.tokenizer not in ("auto", "bpe", "sentencepiece"):
        reason = f"{printable(data.tokenizer)} may have another number"
    elif _is_small(config):
        reason = "so little text may give fewer"
    else:
        return None
    return f"a vocabulary of {data.vocab_size:,} tokens (data.vocab_size) is assumed; {reason}"


def _is_small(config: RunConfig) -> bool:
    try:
        size = sum(source.weight * text_bytes(source) for source in config.data.sources)
    except UserError:  # a data set of which only the name is known
        return False
    return 0 < size < _BYTES_PER_ENTRY * config.data.vocab_size
