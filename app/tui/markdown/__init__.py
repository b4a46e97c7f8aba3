"""The conversation as rows of styled text: Markdown parsed, wrapped and put on a page, with no widget and no terminal."""
