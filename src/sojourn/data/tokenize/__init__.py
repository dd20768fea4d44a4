"""From documents to tokens: chat templates, tokenizers, masks."""
