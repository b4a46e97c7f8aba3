"""The terminal application: command line, chat screen and the child process that holds the engine. Here: exit statuses."""

WRONG_USAGE = 2
"""What argparse ends with."""
INTERRUPTED = 130
"""128 + SIGINT: what a shell reports of a program that Ctrl-C ended."""
PIPE_CLOSED = 141
"""128 + SIGPIPE: what a shell reports of a program that SIGPIPE ended."""
