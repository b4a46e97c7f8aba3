"""GGUF files as the models they hold: read, named as mlx-lm's classes name their parts, repacked for MLX."""
