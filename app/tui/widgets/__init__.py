"""The parts of the chat screen, one noun a file."""
