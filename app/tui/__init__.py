"""The chat's screen. Nothing here imports MLX or the engine itself: the engine is another process (tokamac.app.backend)."""
