"""One module a command: ``parser()`` says what it takes, ``run(parser, options)`` does it and returns the exit status."""
