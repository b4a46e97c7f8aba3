"""One module per command: ``parser()`` and ``run(parser, options) -> exit status``."""
