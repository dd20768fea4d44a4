"""Everything the model reads: sources, tokenizer, masks, packing, the artefact, order."""
