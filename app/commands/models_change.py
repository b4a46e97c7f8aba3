"""``tokamac models pull`` and ``remove``. With --json the chat's picker reads the lines (app/backend/puller.py)."""

import time
from pathlib import Path
from typing import Any

from tokamac.app.commands import loading
from tokamac.app.keep_awake import awake
from tokamac.app.output import json_line, note
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import size

LINES_APART_S = 0.25
"""Lines of progress: a reader draws each, and needs no more of them."""


@awake
def pull(model: str, *, json: bool) -> int:
    """Bring a model to disk, or up to date, which loading one never does by itself; return the exit status."""
    from tokamac.engine import hub

    if model == hub.GUIDE:
        note("note: guide is the embedded model: it is always here, and as new as the program")
    if not json:
        print(loading.fetch(model, hub.pull))
        return 0
    lines = _Lines()
    folder = hub.pull(model, progress=lambda at: lines.tell(at.done, at.total))
    json_line({"event": "pulled", "id": model, "path": str(folder), "bytes": _bytes(folder)})
    return 0


def remove(model: str, *, unfinished: bool, json: bool) -> int:
    """Take a model off the disk, or only what a download left that did not end; return the exit status."""
    from tokamac.engine import hub_cache

    freed = hub_cache.discard_unfinished(model) if unfinished else hub_cache.remove_model(model)
    if json:
        json_line({"event": "removed", "id": model, "freed_bytes": freed})
    elif unfinished and not freed:
        print(f"nothing of {sanitise_line(model)} is unfinished on this disk")
    else:
        print(f"removed {sanitise_line(model)}: {size(freed)} freed")
    return 0


class _Lines:
    """Progress as JSON lines, a few a second."""

    def __init__(self) -> None:
        self._told_s: float | None = None

    def tell(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= LINES_APART_S or done == total:
            self._told_s = now
            line: dict[str, Any] = {"event": "progress", "done": done, "total": total}
            json_line(line)


def _bytes(folder: Path) -> int:
    """Return the bytes of a snapshot's files, which are links into the cache."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
