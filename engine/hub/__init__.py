"""The Hugging Face hub: model names, the cache on disk, downloads."""
