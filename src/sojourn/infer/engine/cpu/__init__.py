"""The engine's operations on a CPU, in C."""
