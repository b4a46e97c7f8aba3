"""One file for screens that belong together: the chat, and what opens over it."""
