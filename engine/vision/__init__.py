"""Pictures in a prompt."""
