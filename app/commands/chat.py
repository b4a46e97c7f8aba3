"""``tokamac chat``: opens the full-screen chat, where there is a screen."""

import argparse
import sys

from tokamac.app.options import (
    SAMPLING_FLAGS,
    Parser,
    add_kv_flags,
    add_sampling_flags,
    any_given,
    kv_spec,
    sampling,
)

_KV_FIELDS = ("kv_bits", "kv_group_size", "kv_window", "kv_keep", "on_full")


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "chat",
        "Open the full-screen chat. Without MODEL it is the one picked last, at first guide, the embedded one.",
        "  tokamac chat\n  tokamac chat mlx-community/Qwen3-4B-Instruct-2507-4bit --kv-bits 8,4 --kv-window 8192",
    )
    made.add_argument("model", nargs="?", metavar="MODEL", help="a folder, a Hugging Face id, or guide")
    add_sampling_flags(made)
    add_kv_flags(made)
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Run the chat until the user leaves it."""
    if options.model is not None and not options.model.strip():
        parser.error("MODEL is empty")
    sampling_given = any_given(options, tuple(SAMPLING_FLAGS.values()))
    kv_given = any_given(options, _KV_FIELDS)
    if (
        sampling_given or kv_given
    ):  # flags change what the settings remember, one by one; checked before the screen opens
        from tokamac.app import settings

        known = settings.load(settings.default_path()).settings
        chosen_sampling = sampling(parser, options, known.sampling) if sampling_given else None
        chosen_kv = kv_spec(parser, options, known.kv) if kv_given else None
    else:
        chosen_sampling, chosen_kv = None, None
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error('the chat needs a terminal; without one use `tokamac ask "PROMPT"`')
    from tokamac.app.tui.run import ChatOptions, run_chat

    return run_chat(
        ChatOptions(
            model=options.model,
            sampling=chosen_sampling,
            kv=chosen_kv,
            prompt_cache=not options.no_prompt_cache,
        )
    )
