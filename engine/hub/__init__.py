"""The Hugging Face hub: names of models, its cache on disk, downloads."""
