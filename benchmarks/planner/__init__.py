"""How right plans are: real optimizer steps of many runs, against what was planned for them."""
