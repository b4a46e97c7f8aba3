"""The full-screen chat. Nothing here imports MLX or the engine itself: the engine is another process."""
