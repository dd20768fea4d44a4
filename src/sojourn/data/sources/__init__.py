"""Data sources: find files and data sets, read them, detect their format, and convert records to documents."""
