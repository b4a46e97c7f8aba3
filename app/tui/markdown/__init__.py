"""The conversation as rows of styled text: parsed, wrapped, paged; no widget or terminal."""
