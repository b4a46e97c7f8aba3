"""A model: its config, its weights and its layers, brought to what mlx-lm's classes take."""
