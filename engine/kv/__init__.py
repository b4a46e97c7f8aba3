"""KV caches: a layout (growing, or a ring with pinned sinks) times a codec each for keys and values."""
