"""Text and numbers for a terminal."""
