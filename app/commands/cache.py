"""``tokamac cache``: list, clear or verify the prompt cache on disk; ``cache export`` and ``import``: one prompt as a file."""

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
    add_flags,
    add_kv_flags,
    any_given,
    default_model,
    kv_spec,
)
from ..parser import ActionParser, Parser
from ..text.sanitise import sanitise_line
from ..text.terminal import Progress, json_line, note, table
from ..text.units import UNKNOWN, count, size
from . import loading
from .prompts import compose

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.lab.exchange import Exchanged
    from tokamac.engine.prompt_cache.cache import Check
    from tokamac.engine.prompt_cache.folder import Folder


ACTIONS = {
    "show": "location and size",
    "clear": "delete everything",
    "check": "recompute what is stored for MODEL with these KV flags, and compare",
    "export": "compute a prompt and save its KV cache to a file",
    "import": "add such a file to the cache of its model",
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
    made = ActionParser(
        "cache",
        "Manage the prompt cache on disk, so that no prompt is computed twice, even after a restart. TOKAMAC_CACHE_DIR moves it.",
        "  tokamac cache\n  tokamac cache clear\n  tokamac cache check guide --kv-bits 8,4\n"
        "  tokamac cache export book.kv -f book.txt --system 'Answer from the book.' -m guide\n"
        "  tokamac cache import book.kv -m guide",
        ACTIONS,
    )
    made.add_argument(
        "subject",
        nargs="?",
        metavar="MODEL|FILE",
        help="check: a model (default: the one used last); export, import: the file",
    )
    made.add_argument("prompt", nargs="?", metavar="PROMPT", help="export: the question; without it, any may follow")
    add_flags(made, "-m --model", "-f --file", "--system")
    made.add_argument("--json", action="store_true", help="one JSON object")
    add_kv_flags(made, cache=False)
    add_flags(made, "--adapter", "--memory")
    made.only(("check", "export", "import"), "subject", "memory", "adapter")
    made.only(("check", "export"), *_KV_FLAGS)
    made.only(("export", "import"), "model")
    made.only(("export",), "prompt", "file", "system")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    _refuse(parser, options)
    if options.action in ("export", "import"):
        if not options.subject:
            parser.error(f"name the file: tokamac cache {options.action} prompt.kv -m MODEL")
        return run_file(parser, options)
    if options.action == "check":
        return _check(options, kv_spec(parser, options))
    return _show(json_wanted=options.json) if options.action == "show" else _clear(json_wanted=options.json)


def _refuse(parser: Parser, options: argparse.Namespace) -> None:
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
    if not models:
        return "nothing is stored yet; it fills as you chat and ask"
    rows = [["model", "files", "size", "last used"]]
    for model in models:
        used = time.strftime("%Y-%m-%d", time.localtime(model["last_used"]))
        rows.append([sanitise_line(model["model"] or "") or UNKNOWN, count(model["files"]), size(model["bytes"]), used])
    shown = table(rows, right=(1, 2))
    if len({row[0] for row in rows[1:]}) < len(models):
        shown += "\n\na model has a row for each of its versions and KV settings"
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
        f"tokamac: {count(len(wrong))} of {count(len(checks))} stored prefixes differ by more than rounding. "
        "Run: tokamac cache clear"
    )
    return 1


def _checks(options: argparse.Namespace, name: str, kv: KVSpec) -> list["Check"]:
    checks, bar = [], Progress("recomputing", plain=False)
    with loading.load(options, name, kv, PromptCacheSpec()) as engine, closing(engine.check_cache()) as steps:
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
    """Return the segment folder. Raises TokamacError if unlistable, which ``Folder`` would take for empty."""
    from tokamac.engine.prompt_cache.folder import Folder, default_root

    folder = Folder(default_root())
    with _saying(folder, "read"), suppress(FileNotFoundError):  # nothing is stored yet
        next(folder.root.iterdir(), None)
    return folder


@contextmanager
def _saying(folder: "Folder", done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TokamacError(
            f"the prompt cache in {folder.root} can't be {done}: {error.strerror or error}",
            "Check the folder and its permissions, or set TOKAMAC_CACHE_DIR to another.",
        ) from error


def run_file(parser: Parser, options: argparse.Namespace) -> int:
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
    """Return what was exported; None if Ctrl-C ended it, with nothing written."""
    kv = kv_spec(parser, options)
    prompt = compose(options.prompt, options.file)
    if not prompt and not options.system:
        parser.error("there is nothing to compute: give a PROMPT, --system or -f")
    messages = [Message("system", options.system)] if options.system else []
    messages.append(Message("user", prompt))
    with loading.load(options, model, kv, PromptCacheSpec()) as engine, loading.interrupting(engine.cancel):
        return _computed(engine, messages, file, goes_on=options.prompt is None)


def _computed(engine: "Engine", messages: list[Message], file: Path, *, goes_on: bool) -> "Exchanged | None":
    from tokamac.engine.lab.exchange import Exchanged

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
    from tokamac.engine.prompt_cache.folder import read_portable

    kv = read_portable(file).kv  # before seconds are spent on loading
    with loading.load(options, model, kv, PromptCacheSpec()) as engine:
        return engine.import_prompt(file)
