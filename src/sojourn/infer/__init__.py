"""Asking a model: load, generate, chat, evaluate."""
