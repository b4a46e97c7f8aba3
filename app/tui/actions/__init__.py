"""What each action of the registry does, given the chat screen and what was written after a slash command."""
