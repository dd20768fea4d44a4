"""`sojourn bench train`: throughput and memory per optimisation and peer on the same work, with every loss compared."""
