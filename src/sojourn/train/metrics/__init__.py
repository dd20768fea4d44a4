"""What a run logs: metrics, throughput, the progress line, trackers, its environment."""
