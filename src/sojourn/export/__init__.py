"""Export: merge adapters, write a model in another format, replay it there, and keep it only where it agrees."""
