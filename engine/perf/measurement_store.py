"""Measurements of this machine, kept in small JSON files: {what was measured, where and with what: a number}.

A file that is damaged, or a value that can't be right, is as good as none: it is measured again.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..device import DeviceKind, usable_cores
from ..files import atomic_write, read_text
from .hardware import Chip


def store_file(name: str) -> Path:
    """Return the file of this name in the cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("tokamac")) / name


def machine_key(chip: Chip, device: DeviceKind) -> str:
    """Return what a measurement depends on beside its subject: the chip, its cores, and the library that computes."""
    from importlib import metadata

    library = "numpy" if device == "cpu" else "mlx"
    cores = usable_cores() if device == "cpu" else chip.gpu_cores
    versions = f"mlx {metadata.version('mlx')} {library} {metadata.version(library)}"
    return f"{chip.name} | {cores} cores | {device} | {versions}"


def read(file: Path, key: str) -> float | None:
    """Return the kept number; None where there is none, or it can't be right."""
    return read_all(file).get(key)


def read_all(file: Path) -> dict[str, float]:
    """Return all numbers of a file that can be right: above zero and below a million."""
    numbers = {key: value for key, value in load(file).items() if type(value) in (int, float)}
    return {key: float(value) for key, value in numbers.items() if 0 < value < 1e6}


def keep(file: Path, values: Mapping[str, Any]) -> None:
    """Add numbers, or objects, to a file, mode 0600, whole or not at all. Where it can't be written they are not kept."""
    write(file, {**load(file), **values})


def write(file: Path, values: Mapping[str, Any]) -> None:
    """Write a file anew, mode 0600, whole or not at all. Where it can't be written nothing happens."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=1)
        with atomic_write(file, f".{file.stem}-") as whole:
            whole.write(text.encode())


def load(file: Path) -> dict[str, Any]:
    """Return what a file holds; {} where there is none, or it is damaged."""
    try:
        kept = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError):  # the last: of brackets without end
        return {}
    return kept if isinstance(kept, dict) else {}
