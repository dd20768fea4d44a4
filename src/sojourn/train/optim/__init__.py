"""Optimizers by name, schedules, and their state as named tensors."""
