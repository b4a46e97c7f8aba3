"""Predicted and measured performance."""
