"""Text and token ids: messages rendered to a prompt, and tokens detokenized to text."""
