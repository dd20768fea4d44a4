"""Starting several ranks: torchrun's agent and its workers, command lines for Slurm and Kubernetes."""
