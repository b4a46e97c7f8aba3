"""The chat as lines: for screen readers, for pipes, and wherever there is no screen. Same session, engine process and store."""
