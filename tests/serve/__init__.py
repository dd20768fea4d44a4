"""Overload, real engines and their own benchmarks against `sojourn serve`; `make test-serve`."""
