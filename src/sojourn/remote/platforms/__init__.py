"""One file per platform with an API or a way of its own to run a job."""
