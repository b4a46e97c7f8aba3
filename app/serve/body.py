"""A request's body: JSON read strictly; a long one in a process of its own.

``python -m tokamac.app.serve.body`` reads a body on stdin, and writes what it says on stdout, for ``marshal``.
"""

import asyncio
import json
import marshal
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from typing import Any

DEEPEST = 100  # objects within objects: more than any schema of a tool has
LONGEST_WHOLE = 300  # digits of a whole number: more than that is no float either
MOST_VALUES = 2**21  # in a long body: a million token ids are one each


class UnreadableBodyError(ValueError):
    """A body that can't be read. Arguments: what is wrong, and what to do."""


def read_object(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object. Raises UnreadableBodyError."""
    try:
        given = json.loads(body, parse_constant=_no_constant, parse_float=_real, parse_int=_whole)
    except UnreadableBodyError:
        raise
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "it can't be read"
        raise UnreadableBodyError(f"the body is not JSON: {why}", "Send a JSON object in UTF-8.") from None
    if not isinstance(given, dict):
        raise UnreadableBodyError("the body is not a JSON object", 'Send one, such as {"messages": […]}.')
    _check_shape(given)
    return given


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _real(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise _too_large(written)
    return value


def _whole(written: str) -> int:
    if len(written) > LONGEST_WHOLE:
        raise _too_large(written)
    return int(written)


def _too_large(written: str) -> UnreadableBodyError:
    return UnreadableBodyError(f"the number {written:.20} is too large", "Use one that a float holds.")


def _check_shape(value: object) -> None:
    deepest, values, level = 0, 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        deepest += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        values += len(level)
        if values > MOST_VALUES:
            raise UnreadableBodyError(f"the body has more than {MOST_VALUES:,} values", "Send less.")
        if deepest > DEEPEST:
            raise UnreadableBodyError(f"the body is nested more than {DEEPEST} deep", "Flatten it.")


async def read_apart(body: bytes) -> Mapping[str, Any]:
    """``read_object`` in another process: json holds the interpreter for as long as it reads. Ends it when cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        written, _ = await process.communicate(body)
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if not written:
        raise UnreadableBodyError("the body can't be read here: there was no memory for it", "Send less.")
    found = marshal.loads(written)
    if isinstance(found, tuple):
        raise UnreadableBodyError(*found)
    return found  # type: ignore[no-any-return]


def main() -> None:
    """Read one body."""
    try:
        found: Any = read_object(sys.stdin.buffer.read())
    except UnreadableBodyError as error:
        found = error.args
    sys.stdout.buffer.write(marshal.dumps(found))


if __name__ == "__main__":
    main()
