"""Terminal application: command line, chat screen, engine child process. Defines the exit statuses."""

WRONG_USAGE = 2  # what argparse ends with
INTERRUPTED = 130  # 128 + SIGINT: what a shell reports of a program that Ctrl-C ended
PIPE_CLOSED = 141  # 128 + SIGPIPE: what a shell reports of a program that SIGPIPE ended
