"""`sojourn serve`: an OpenAI-compatible gateway over one of several engines."""
