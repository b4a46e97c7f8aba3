"""What the screen and the engine's process say to each other: one JSON object a line, of ``requests`` and ``replies``.

Decoding is strict. A line that is too long, is not JSON, has an unknown kind, an unknown or missing field, or a value of the
wrong type is a ``WireError``, never a traceback further in. No line ever holds a raw newline: JSON escapes them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import get_args

from tokamac.app.backend.replies import (
    Counted,
    Done,
    Failed,
    Heartbeat,
    LeftOut,
    Loaded,
    Loading,
    MemoryUse,
    ModelInfo,
    Notice,
    Prefill,
    Priced,
    Reply,
    ShortOfMemory,
    Stats,
    Text,
    Unloaded,
    WhatIf,
)
from tokamac.app.backend.requests import AskCount, AskPrice, AskWhatIf, Cancel, Load, Quit, Request, Send, Unload, Warm
from tokamac.app.backend.shapes import ShapeError, build
from tokamac.engine.errors import TokamacError

__all__ = [
    "LONGEST_LINE",
    "AskCount",
    "AskPrice",
    "AskWhatIf",
    "Cancel",
    "Counted",
    "Done",
    "Failed",
    "Heartbeat",
    "LeftOut",
    "Load",
    "Loaded",
    "Loading",
    "MemoryUse",
    "ModelInfo",
    "Notice",
    "Prefill",
    "Priced",
    "Quit",
    "Reply",
    "Request",
    "Send",
    "ShortOfMemory",
    "Stats",
    "Text",
    "Unload",
    "Unloaded",
    "Warm",
    "WhatIf",
    "WireError",
    "decode_reply",
    "decode_request",
    "encode",
]

LONGEST_LINE = 64 * 2**20  # a conversation that fills a context of a million tokens is about 5 MB


class WireError(TokamacError):
    """A line that is not a message."""


_REQUESTS = {kind.__name__.lower(): kind for kind in get_args(Request)}
_REPLIES = {kind.__name__.lower(): kind for kind in get_args(Reply)}


def encode(message: Request | Reply) -> bytes:
    """Return ``message`` as one line, newline included."""
    fields = {"type": type(message).__name__.lower(), **asdict(message)}
    # ASCII, so that a reader may cut the line at any byte and lone surrogates survive as escapes.
    return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode_request(line: bytes) -> Request:
    """Return the request on ``line``; raise WireError if there is none."""
    message = _decode(line, _REQUESTS)
    assert isinstance(message, Request)
    return message


def decode_reply(line: bytes) -> Reply:
    """Return the reply on ``line``; raise WireError if there is none."""
    message = _decode(line, _REPLIES)
    assert isinstance(message, Reply)
    return message


def _decode(line: bytes, kinds: Mapping[str, type]) -> object:
    if len(line) > LONGEST_LINE:
        raise WireError(f"a line of {len(line)} bytes is too long", f"At most {LONGEST_LINE} are read.")
    try:
        fields = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}", str(error)[:120]) from error
    if not isinstance(fields, dict):
        raise WireError(f"not an object: {line[:80]!r}")
    name = fields.pop("type", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"unknown type {name!r}"[:120])
    try:
        return build(kind, fields, str(name))
    except (ShapeError, TokamacError) as error:
        raise WireError(f"a bad message: {error}"[:200]) from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number here")
