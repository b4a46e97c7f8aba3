"""The embedded model: its corpus, its training and evaluation scripts, and the 4-bit folder that ships (``model/``)."""
