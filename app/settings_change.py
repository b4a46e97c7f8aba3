"""A change of the settings, written into the file as it is now: other windows change it too, and so does its user's editor.

A lock on a file beside it keeps two changes apart: the settings' own file is replaced whole, so that a lock on it holds nobody off.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tokamac.app.settings import DAMAGED, OPTIONS, Settings, read, save, set_aside
from tokamac.engine.errors import OptionError

PATIENCE_S = 2.0
"""How long another window may keep the lock; each change takes milliseconds."""
_MAPS = ("system_prompts", "adapters", "keys", "unknown")
T = TypeVar("T")


def change(path: Path, held: Settings, wanted: Settings) -> tuple[str, ...]:
    """Write what is other in ``wanted`` than in ``held`` into the file, and leave the rest of it; return what is to be said of it.

    A file that is damaged by now is moved aside, and ``wanted`` written whole. Raises OSError where nothing could be written, and
    where the damaged file can't be moved: it is not written over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_name(f".{path.name}.lock")):
        try:
            now = read(path)
        except DAMAGED as error:
            told = set_aside(path, error)
            if path.exists():
                raise OSError(None, told) from error
            save(path, wanted)
            return (told,)
        save(path, merged(now.settings, held, wanted))
        return now.warnings


def merged(now: Settings, held: Settings, wanted: Settings) -> Settings:
    """Return ``now`` with what is other in ``wanted`` than in ``held``: of tables, entry by entry."""
    changes: dict[str, Any] = {}
    for field in fields(Settings):
        was, becomes, stands = (getattr(each, field.name) for each in (held, wanted, now))
        if was == becomes:
            continue
        if field.name in _MAPS:
            becomes = _merged_map(stands, was, becomes)
        elif field.name in OPTIONS:
            becomes = _merged_options(stands, was, becomes)
        changes[field.name] = becomes
    return replace(now, **changes)


def _merged_map(now: Mapping[str, Any], held: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    changed = {name: value for name, value in wanted.items() if name not in held or held[name] != value}
    return {**{name: value for name, value in now.items() if name in wanted or name not in held}, **changed}


def _merged_options(now: T, held: T, wanted: T) -> T:
    names = [field.name for field in fields(wanted)]  # type: ignore[arg-type]  # a dataclass, as all OPTIONS are
    changed = {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(held, name)}
    try:
        return replace(now, **changed)  # type: ignore[type-var]
    except OptionError:  # together with what another window chose it is not valid: what was chosen last holds whole
        return wanted


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keep other windows from changing the settings. Raises OSError where one of them doesn't end in time."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _locked(handle):
            if time.monotonic() > until:
                raise TimeoutError(None, "another tokamac keeps it busy")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
