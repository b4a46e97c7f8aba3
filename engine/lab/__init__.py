"""Experiments on a model beyond replies."""
