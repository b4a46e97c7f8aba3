"""The chat screen's widgets."""
