"""``tokamac cache export`` and ``import``: one computed prompt as a file."""

import argparse
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.commands import loading
from tokamac.app.commands.prompt import compose
from tokamac.app.exit_status import INTERRUPTED
from tokamac.app.options import adapter_of, default_model, kv_spec, memory_limit
from tokamac.app.output import Progress, json_line
from tokamac.app.parser import Parser
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import count, size
from tokamac.engine.events import Message, PrefillProgress
from tokamac.engine.options import PromptCacheSpec

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.prompt_cache.exchange import Exchanged


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Export or import; return the exit status."""
    file, model = Path(options.subject).expanduser(), options.model or default_model()
    found = _export(parser, options, file, model) if options.action == "export" else _import(options, file, model)
    if found is None:
        return INTERRUPTED
    if options.json:
        json_line({**asdict(found), "path": str(found.path)})
    elif options.action == "export":
        print(f"{count(found.tokens)} tokens in {sanitise_line(str(file))}: {size(found.nbytes)}")
    else:
        new = f"{size(found.new_bytes)} stored" if found.new_bytes else "it was stored already"
        print(f"{count(found.tokens)} tokens of {sanitise_line(model)}: {new}")
    return 0


def _export(parser: Parser, options: argparse.Namespace, file: Path, model: str) -> "Exchanged | None":
    """Return what was exported; None where Ctrl-C ended it, and nothing was written."""
    kv = kv_spec(parser, options)
    prompt = compose(options.prompt, options.file)
    if not prompt and not options.system:
        parser.error("there is nothing to compute: give a PROMPT, --system or -f")
    messages = [Message("system", options.system)] if options.system else []
    messages.append(Message("user", prompt))
    with (
        loading.load(
            model,
            kv=kv,
            prompt_cache=PromptCacheSpec(),
            memory=memory_limit(options),
            adapter=adapter_of(options, model),
        ) as engine,
        loading.interrupting(engine.cancel),
    ):
        return _computed(engine, messages, file, goes_on=options.prompt is None)


def _computed(engine: "Engine", messages: list[Message], file: Path, *, goes_on: bool) -> "Exchanged | None":
    from tokamac.engine.prompt_cache.exchange import Exchanged

    bar = Progress("computing the prompt", unit="tokens", plain=False)
    found = None
    try:
        with closing(engine.export_prompt(messages, file, goes_on=goes_on)) as events:
            for event in events:
                if isinstance(event, PrefillProgress):
                    bar.update(event.done, event.total)
                elif isinstance(event, Exchanged):
                    found = event
    finally:
        bar.clear()
    return found


def _import(options: argparse.Namespace, file: Path, model: str) -> "Exchanged":
    from tokamac.engine.prompt_cache.portable import read_portable

    kv = read_portable(file).kv  # before seconds are spent on loading
    with loading.load(
        model,
        kv=kv,
        prompt_cache=PromptCacheSpec(),
        memory=memory_limit(options),
        adapter=adapter_of(options, model),
    ) as engine:
        return engine.import_prompt(file)
