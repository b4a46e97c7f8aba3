"""Exit statuses that mean more than that a command failed: 0 is done, 1 failed."""

WRONG_USAGE = 2
"""What argparse ends with."""
INTERRUPTED = 130
"""128 + SIGINT: what a shell reports of a program that Ctrl-C ended."""
PIPE_CLOSED = 141
"""128 + SIGPIPE: what a shell reports of a program that SIGPIPE ended."""
