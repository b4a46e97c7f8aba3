"""Available models (local, catalogue, hub), how they would run here, and downloads."""
