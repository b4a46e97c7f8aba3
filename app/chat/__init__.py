"""The chat's screen-independent core, shared by the full-screen and the plain chat."""
