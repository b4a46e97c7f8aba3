"""One file a screen: the chat, and what opens over it."""
