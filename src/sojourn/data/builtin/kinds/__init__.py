"""The kinds of text: each draws the facts of one text, and takes its words from a language."""
