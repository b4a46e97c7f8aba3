"""Records between rank 0 and a follower: one JSON object a line, over the pipes of the follower's process."""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

Record = Mapping[str, Any]

LONGEST_LINE = 1 << 24
"""Bytes: the ids of a piece of a prompt are a small part of it."""


class Channel:
    """Writes records to a file descriptor; any thread may."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, record: Record) -> None:
        """Write a record. Raises OSError where nobody reads any more."""
        line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]


def records(stream: IO[bytes]) -> Iterator[Record]:
    """Yield what arrives until the other end is closed; a line that is no record ends it, too."""
    while line := stream.readline(LONGEST_LINE):
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record
