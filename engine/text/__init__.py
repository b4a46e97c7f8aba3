"""Text and token ids: messages rendered to a prompt, and tokens shown as text."""
