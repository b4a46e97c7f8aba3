"""Markdown as rows of styled text: parsed here, wrapped here, drawn by one light widget a block."""
