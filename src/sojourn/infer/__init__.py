"""Inference: load a model, generate text. Training samples, evaluations, chat and the demo share this code."""
