"""``tokamac chat``: full-screen where possible, else plain lines."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tokamac.engine.errors import TokamacError

from .. import prompt_files, settings
from ..options import (
    AUTO,
    MODEL,
    SAMPLING_FLAGS,
    TEMPLATE_FLAGS,
    add_flags,
    add_nodes_flags,
    add_profile_flag,
    add_reply_flags,
    add_speculation_flags,
    any_given,
    check_speculation_flags,
    given_adapter,
    given_draft,
    given_profile,
    kv_spec,
    model_name,
    nodes_of,
    over,
    sampling,
    template_options,
    warn,
)
from ..parser import Parser
from ..settings import NO_PROFILE, Profile

_KV_FIELDS = ("kv_bits", "kv_group_size", "kv_window", "kv_keep", "on_full")


def parser() -> Parser:
    made = Parser(
        "chat",
        "Open the full-screen chat. Without MODEL, it opens the model used last, at first the embedded guide. Without a "
        "terminal, or with TERM=dumb, the chat is plain lines (--plain). Flags override the settings.",
        "  tokamac chat\n  tokamac chat --continue\n"
        "  tokamac chat mlx-community/Qwen3-4B-Instruct-2507-4bit --kv-bits 8,4 --kv-window 8192\n"
        "  tokamac chat --plain < questions.txt > answers.txt",
    )
    made.add_model(model_name, MODEL)
    made.add_argument(
        "--plain", action="store_true", help="plain lines, for screen readers, pipes and simple terminals"
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("-c", "--continue", action="store_true", dest="resume", help="continue the last chat")
    which.add_argument("--chat", metavar="ID", help="continue this chat; IDs can be abbreviated")
    add_profile_flag(made, "the one used last; none for no profile")
    add_flags(made, "--prompt")
    which.add_argument("--private", action="store_true", help="keep nothing of this chat, as /private does")
    add_reply_flags(made)
    add_flags(made, "--parallel", "--pace")
    add_speculation_flags(made)
    add_nodes_flags(made)
    made.add_argument(
        "--server", choices=("auto", "off"), default="auto",
        help="auto: share the engine of your running tokamac serve, if it has this model (default: auto)",
    )  # fmt: skip
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    if options.model is not None and not options.model.strip():
        parser.error("MODEL is empty")
    check_speculation_flags(parser, options)
    if options.prompt_file is not None:
        prompt_files.read(prompt_files.folder_in(settings.default_path().parent), options.prompt_file)
    sampling_given = any_given(options, tuple(SAMPLING_FLAGS.values()))
    template_given = any_given(options, tuple(TEMPLATE_FLAGS.values()))
    kv_given = any_given(options, _KV_FIELDS)
    # Flags change what the settings remember, one by one; they are checked before the screen opens.
    some_given = sampling_given or kv_given or template_given or options.profile is not None
    read = settings.load(settings.default_path()) if some_given else None
    lacking = _lacking()
    plain = options.plain or bool(lacking)
    from ..chat.start import ChatOptions, found
    from ..tui.run import run_chat

    with _warned(read):
        base = Profile() if read is None else _profile(parser, options, read.settings)
        known = settings.Settings() if read is None else read.settings
        chosen = ChatOptions(
            model=options.model,
            sampling=sampling(parser, options, over(parser, base, known.sampling)) if sampling_given else None,
            template=template_options(parser, options, over(parser, base, known.template)) if template_given else None,
            kv=kv_spec(parser, options, over(parser, base, known.kv), compacts=True) if kv_given else None,
            profile="" if options.profile == NO_PROFILE else options.profile,
            prompt_cache=not options.no_prompt_cache,
            memory=None if options.memory is None else round(options.memory * 1e9),
            unchecked=options.unchecked,
            cpu_exact=options.cpu_exact,
            pace=options.pace,
            adapter=None if options.adapter is None else given_adapter(options.adapter),
            parallel=options.parallel,
            speculation=None if options.speculation is None else options.speculation == AUTO,
            draft=None if options.draft is None else given_draft(options.draft),
            nodes=nodes_of(parser, options),
            server=options.server == "auto",
            chat=options.chat,
            resume=options.resume,
            prompt=options.prompt_file,
            private=options.private,
            read=read,
        )
        chosen = chosen if plain else found(chosen)
    if plain:
        from ..plain.repl import run_plain

        if not options.plain and sys.stdout.isatty():  # else nobody is there to wonder
            aside = sys.stderr if sys.stderr and sys.stderr.isatty() else sys.stdout
            print(f"Plain chat, since {lacking}.", file=aside, flush=True)
        return run_plain(chosen)
    return run_chat(chosen)


def _profile(parser: Parser, options: argparse.Namespace, known: settings.Settings) -> Profile:
    """Return the profile from the flag or settings. Raises ModelNotFoundError."""
    from ..models.local import require

    if options.profile is None:
        return known.profiles.get(known.profile, Profile())
    if options.profile == NO_PROFILE:
        return Profile()
    found = given_profile(parser, options.profile, known.profiles)
    for base in (known.sampling, known.template, known.kv):
        over(parser, found, base)
    if options.model is None:
        require(found.model or "", options.profile, "tokamac models pull")
    return found


def _lacking() -> str:
    """Return why full screen is impossible, or "". Textual draws on stderr."""
    if os.environ.get("TERM") == "dumb":
        return "TERM is dumb"
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    return next(
        (f"{name} is not a terminal" for name, each in streams.items() if each is None or not each.isatty()), ""
    )


@contextmanager
def _warned(read: settings.LoadedSettings | None) -> Iterator[None]:
    try:
        yield
    except (TokamacError, SystemExit):
        warn(() if read is None else read.warnings)
        raise
