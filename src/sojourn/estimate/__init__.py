"""Memory and step time of a workload on a device (no torch)."""
