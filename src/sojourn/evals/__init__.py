"""Evaluation of a trained model: held-out loss, and exact match on held-out questions."""
