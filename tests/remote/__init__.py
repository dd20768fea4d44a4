"""Long tests of the rented box: make test-remote."""
