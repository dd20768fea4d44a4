"""From what the user has to documents: find files and data sets, read, recognise."""
