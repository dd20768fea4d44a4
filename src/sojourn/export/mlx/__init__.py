"""The MLX format: a folder that mlx-lm opens on a Mac."""
