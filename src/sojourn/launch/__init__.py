"""Starting several processes: torchrun's agent, Slurm and Kubernetes command lines (no torch)."""
