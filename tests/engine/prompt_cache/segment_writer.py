"""Processes that write segments until they are killed, forked from a warm interpreter: a fresh one takes longer than they live.

As a script, ``-m tests.engine.prompt_cache.segment_writer FOLDER``: reads a line for every process that is to begin
and answers with its number
once it is at work; the next line is read when that process has ended.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
MODEL = "ab" * 16


def write(root: Path, ready: Callable[[], None]) -> None:
    """Write segments for ever."""
    from tokamac.engine.prompt_cache.folder import Folder, child_name, root_name

    folder, parent = Folder(root), root_name(MODEL, None)
    folder.tidy()
    ready()
    for number in range(10**6):
        folder.write(MODEL, "m", parent, child_name(parent, [number]), bytes([number % 256]) * (20000 + number % 977))


class Writers:
    """Begins writers, one after another."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def begin(self) -> int:
        """Return the process number of a writer that is at work; the one before must have been killed."""
        self._process.stdin.write("begin\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def ended(self) -> int:
        """Wait for the last writer to end; return its status, as ``os.waitpid`` does."""
        return int(self._process.stdout.readline())


@contextmanager
def writers(root: Path) -> Iterator[Writers]:
    """Yield what begins writers into the folder ``root``."""
    command = [sys.executable, "-m", "tests.engine.prompt_cache.segment_writer", str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Writers(process)
        process.stdin.close()


def main() -> None:
    import tokamac.engine.prompt_cache.folder  # noqa: F401

    for _ in sys.stdin:
        number = os.fork()
        if not number:
            write(Path(sys.argv[1]), lambda: print(os.getpid(), flush=True))
        print(os.waitpid(number, 0)[1], flush=True)


if __name__ == "__main__":
    main()
