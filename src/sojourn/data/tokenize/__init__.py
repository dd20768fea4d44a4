"""Documents to tokens: chat templates, tokenizers, loss masks."""
