"""`sojourn bench serve`: throughput and latency of a served model under load, beside peers."""
