"""Runtimes: programs that open an exported model, each behind the same few calls."""
