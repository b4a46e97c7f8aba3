"""How many files this process may have open: MLX holds every shard of a checkpoint open until all its arrays are read.

macOS begins with 256, and large checkpoints have more shards; a conversion opens its source twice.
"""

import resource
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tokamac.engine.errors import DeviceError

WANTED = 8192
"""More than twice the shards of any checkpoint, and less than macOS lets a process have (10,240 or more)."""

READINGS, OTHERS = 3, 64
"""How often a conversion may have its source open, and what else a process has open, at most about."""

REMEDY = f"Let it have more: ulimit -n {WANTED}; where the system refuses that, whoever runs it sets the hard limit."

_importing = threading.Lock()


def raise_open_files(wanted: int = WANTED) -> None:
    """Raise the soft limit on open files to ``wanted``, as far as the hard one lets it; a higher one stays."""
    _raise(wanted, resource.setrlimit)


def _raise(wanted: int, setrlimit: Callable[[int, tuple[int, int]], None]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def not_opened(error: Exception, folder: Path) -> DeviceError | None:
    """Return what to tell a user where a model could not be loaded because it has more shards than files may be open.

    MLX says "Failed to open file" whatever the reason was, so None wherever the limit leaves room for the shards.
    """
    if "Failed to open" not in str(error):
        return None
    traceback.clear_frames(
        error.__traceback__
    )  # they hold what was opened, and to look into the folder takes a file too
    shards = len(list(folder.glob("model*.safetensors")))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or allowed > READINGS * shards + OTHERS:
        return None
    return DeviceError(f"this process may have {allowed} files open, and {folder} has {shards} shards", REMEDY)


def import_mlx_lm() -> None:
    """Import mlx-lm, without what that does to the limit on open files.

    ``mlx_lm/utils.py`` sets it to 2,048 and at most 4,096 when it is imported: that fails where the hard limit is lower, and
    lowers a higher one for the rest of the process. Here the soft limit is raised where it can be, and the hard one stays.
    """
    with _importing:
        if "mlx_lm.utils" in sys.modules:
            return
        setrlimit = resource.setrlimit

        def raised(which: int, limits: tuple[int, int], /) -> None:
            if which == resource.RLIMIT_NOFILE:
                _raise(limits[0], setrlimit)
            else:
                setrlimit(which, limits)

        resource.setrlimit = raised
        try:
            import mlx_lm.utils  # noqa: F401
        finally:
            resource.setrlimit = setrlimit
