"""``tokamac cache``: the prompt cache on disk. What is stored, remove it, compute it again and compare.

``tokamac cache export`` and ``import``: one computed prompt as a file.
"""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Message, PrefillProgress
from tokamac.engine.files import expanded
from tokamac.engine.options import KVSpec, PromptCacheSpec

from .. import INTERRUPTED
from ..options import (
    add_adapter_flag,
    add_kv_flags,
    add_memory_flag,
    add_model_flag,
    any_given,
    default_model,
    kv_spec,
)
from ..output import Progress, json_line, note, table
from ..parser import ActionParser, Parser
from ..prompts import compose
from ..sanitise import sanitise_line
from ..units import UNKNOWN, count, size
from . import loading

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.prompt_cache.cache import Check
    from tokamac.engine.prompt_cache.exchange import Exchanged
    from tokamac.engine.prompt_cache.folder import Folder


ACTIONS = {
    "show": "where it is and how much space it takes",
    "clear": "remove all of it",
    "check": "compute what is stored for MODEL with these KV flags again, and compare",
    "export": "compute a prompt and write its keys and values to one file",
    "import": "put such a file into the cache of the model that computed it",
}
_TAKEN_BY = {
    "memory": ("check", "export", "import"),
    "adapter": ("check", "export", "import"),
    "model": ("export", "import"),
    "prompt": ("export",),
    "file": ("export",),
    "system": ("export",),
}
_KV_FLAGS = ("kv_bits", "kv_window", "kv_group_size", "kv_keep", "on_full")


def parser() -> ActionParser:
    """Return what the command takes."""
    made = ActionParser(
        "cache",
        "The prompt cache on disk: prompts that were computed once and need not be read again, also after a restart. "
        "TOKAMAC_CACHE_DIR moves it.",
        "  tokamac cache\n  tokamac cache clear\n  tokamac cache check guide --kv-bits 8,4\n"
        "  tokamac cache export book.kv -f book.txt --system 'Answer from the book.' -m guide\n"
        "  tokamac cache import book.kv -m guide",
        ACTIONS,
    )
    made.add_argument(
        "subject",
        nargs="?",
        metavar="MODEL|FILE",
        help="of check: a folder, a Hugging Face id, or guide (the one picked last); of export and import: the file",
    )
    made.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="of export: what is asked; without it the prompt may go on with anything",
    )
    add_model_flag(made)
    made.add_argument(
        "-f", "--file", action="append", default=[], metavar="FILE", help="a text file or a PDF; may be repeated"
    )
    made.add_argument("--system", metavar="TEXT", help="the system prompt")
    made.add_argument("--json", action="store_true", help="one JSON object")
    add_kv_flags(made, cache=False)
    add_adapter_flag(made)
    add_memory_flag(made)
    made.only(("check", "export", "import"), "subject", "memory", "adapter")
    made.only(("check", "export"), *_KV_FLAGS)
    made.only(("export", "import"), "model")
    made.only(("export",), "prompt", "file", "system")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Show, clear or check; return the exit status."""
    _refuse(parser, options)
    if options.action in ("export", "import"):
        if not options.subject:
            parser.error(f"name the file: tokamac cache {options.action} prompt.kv -m MODEL")
        return run_file(parser, options)
    if options.action == "check":
        return _check(options, kv_spec(parser, options))
    return _show(json_wanted=options.json) if options.action == "show" else _clear(json_wanted=options.json)


def _refuse(parser: Parser, options: argparse.Namespace) -> None:
    """End with a usage error at what has no effect with an action."""
    action = options.action
    if action in ("show", "clear") and options.subject:
        parser.error(f"{action} takes no MODEL")
    if action not in ("check", "export") and any_given(options, _KV_FLAGS):
        why = ": the file says which were used" if action == "import" else ""
        parser.error(f"KV flags have no effect with {action}{why}")
    for name, takes in _TAKEN_BY.items():
        if getattr(options, name) and action not in takes:
            parser.error(f"{'PROMPT' if name == 'prompt' else f'--{name}'} has no effect with {action}")


def _show(*, json_wanted: bool) -> int:
    folder = _folder()
    with _saying(folder, "read"):
        found = _usage(folder)
    if json_wanted:
        json_line(found)
        return 0
    rows = [
        ["folder", sanitise_line(found["folder"])],
        ["stored", f"{size(found['bytes'])} of {size(found['budget_bytes'])}"],
        ["written today", f"{size(found['written_today_bytes'])} of {size(found['daily_budget_bytes'])}"],
    ]
    print(f"{table(rows)}\n\n{_models(found['models'])}")
    return 0


def _usage(folder: "Folder") -> dict[str, Any]:
    """Return what is stored, as the JSON has it."""
    models = [
        {"model": each.label or None, "fingerprint": each.fingerprint, "files": each.files, "bytes": each.bytes}
        | {"last_used": each.used}
        for each in folder.models()
        if each.files
    ]
    return {
        "folder": str(folder.root),
        "bytes": sum(model["bytes"] for model in models),
        "budget_bytes": folder.total_budget,
        "written_today_bytes": folder.written_today(),
        "daily_budget_bytes": folder.daily_budget,
        "models": models,
    }


def _models(models: list[dict[str, Any]]) -> str:
    """Return a row for each model, and for each KV setting that it was used with."""
    if not models:
        return "nothing is stored yet; it fills as you chat and ask"
    rows = [["model", "files", "size", "last used"]]
    for model in models:
        used = time.strftime("%Y-%m-%d", time.localtime(model["last_used"]))
        rows.append([sanitise_line(model["model"] or "") or UNKNOWN, count(model["files"]), size(model["bytes"]), used])
    shown = table(rows, right=(1, 2))
    if len({row[0] for row in rows[1:]}) < len(models):
        shown += "\n\na model is listed once for each KV setting, and each version of it, that was used"
    return shown


def _clear(*, json_wanted: bool) -> int:
    folder = _folder()
    with _saying(folder, "cleared"):
        freed = folder.clear()
    if json_wanted:
        json_line({"freed_bytes": freed})
    else:
        print(f"prompt cache cleared: {size(freed)} freed" if freed else "nothing was stored")
    return 0


def _check(options: argparse.Namespace, kv: KVSpec) -> int:
    _folder()  # one that can't be read is no empty one
    name, json_wanted = options.subject or default_model(), options.json
    checks = _checks(options, name, kv)
    worst = max((_size(check.difference) for check in checks), default=None)
    if json_wanted:
        json_line({"checks": [_json(check) for check in checks], "largest_difference": _finite(worst)})
    elif worst is None:
        print(f"no complete prefix is stored for {sanitise_line(name)} with these KV settings: nothing to check")
    else:
        print(f"largest difference {worst:.2g}")
    wrong = [check for check in checks if _size(check.difference) > check.bound]
    if not wrong:
        return 0
    note(
        f"tokamac: {count(len(wrong))} of {count(len(checks))} stored prefixes are off by more than rounding explains. "
        "Run: tokamac cache clear"
    )
    return 1


def _checks(options: argparse.Namespace, name: str, kv: KVSpec) -> list["Check"]:
    """Return a check of each stored prefix; for people, each is a line as it comes."""
    checks, bar = [], Progress("computing what is stored again", plain=False)
    with loading.load_for(options, name, kv, PromptCacheSpec()) as engine, closing(engine.check_cache()) as steps:
        try:
            bar.update(0, None)
            for check in steps:
                checks.append(check)
                if not options.json:
                    bar.clear()
                    top = "the same top token" if check.top_same else "another likeliest token"
                    rounding = f"up to {check.bound:.2g} is rounding"
                    found = f"difference {check.difference:.2g} ({rounding}), {top}"
                    print(f"{count(check.tokens)} tokens: {found}", flush=True)
                    bar.update(0, None)
        finally:
            bar.clear()
    return checks


def _json(check: "Check") -> dict[str, Any]:
    return {"tokens": check.tokens, "difference": _finite(check.difference), "top_same": check.top_same}


def _size(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _folder() -> "Folder":
    """Return the folder of stored segments. Raises TokamacError if it is there and can't be listed: ``Folder`` finds it empty."""
    from tokamac.engine.prompt_cache.folder import Folder, default_root

    folder = Folder(default_root())
    with _saying(folder, "read"), suppress(FileNotFoundError):  # nothing is stored yet
        next(folder.root.iterdir(), None)
    return folder


@contextmanager
def _saying(folder: "Folder", done: str) -> Iterator[None]:
    """Say what could not be done with the folder."""
    try:
        yield
    except OSError as error:
        raise TokamacError(
            f"the prompt cache in {folder.root} can't be {done}: {error.strerror or error}",
            "Check the folder and its permissions, or set TOKAMAC_CACHE_DIR to another.",
        ) from error


def run_file(parser: Parser, options: argparse.Namespace) -> int:
    """Export or import; return the exit status."""
    file, model = expanded(options.subject), options.model or default_model()
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
    with loading.load_for(options, model, kv, PromptCacheSpec()) as engine, loading.interrupting(engine.cancel):
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
    with loading.load_for(options, model, kv, PromptCacheSpec()) as engine:
        return engine.import_prompt(file)
