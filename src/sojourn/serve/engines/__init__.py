"""Engines behind one interface (`base.py`): tokens in and out, or a server that speaks OpenAI's API itself."""
