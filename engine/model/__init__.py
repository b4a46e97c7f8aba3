"""Models: config, weights and layers, adapted to mlx-lm's classes."""
