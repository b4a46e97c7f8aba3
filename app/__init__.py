"""The terminal application: command line, chat screen and the child process that holds the engine."""
