"""The line-based chat for screen readers, pipes and dumb terminals; same session, engine process and store."""
