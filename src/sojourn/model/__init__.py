"""Models: from-scratch architectures and loading."""
