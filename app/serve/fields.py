"""Reads a request's JSON strictly: each field by name and type, and nothing is ignored that was not asked for.

What a client gives and nobody reads is an error that names it, so an option never goes nowhere. ``null`` is as if it were left out,
as in the interfaces that this speaks.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .errors import RequestError, unsupported

DEEPEST = 100
"""Objects within objects: more than any schema of a tool has."""
LONGEST_WHOLE = 300
"""Digits of a whole number: more than that is no float either."""


def parsed(body: bytes) -> Mapping[str, Any]:
    """Return a body's object. Raises RequestError."""
    try:
        given = json.loads(body, parse_constant=_no_constant, parse_float=_real, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "it can't be read"
        raise RequestError(
            f"the body is not JSON: {why}", "Send a JSON object in UTF-8.", code="invalid_json"
        ) from None
    if not isinstance(given, dict):
        raise RequestError("the body is not a JSON object", 'Send one, such as {"messages": […]}.', code="invalid_json")
    if _depth(given) > DEEPEST:
        raise RequestError(f"the body is nested more than {DEEPEST} deep", "Flatten it.", code="invalid_json")
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


def _too_large(written: str) -> RequestError:
    return RequestError(f"the number {written:.20} is too large", "Use one that a float holds.", code="invalid_json")


def _depth(value: object) -> int:
    """Return how deep lists and objects are within each other, without a stack of Python's."""
    deepest, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        deepest += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return deepest


class Fields:
    """An object's fields, each read once by its name.

    Args:
        given: what JSON gave.
        where: its own name in errors; "" is the body.
    """

    def __init__(self, given: object, where: str = "") -> None:
        self.where = where
        if not isinstance(given, dict):
            raise self.wrong("", "an object")
        self._given: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        """Return a field's name in errors."""
        return f"{self.where}.{field}" if self.where and field else self.where or field

    def wrong(self, field: str, what: str) -> RequestError:
        """Return the error for a field that is no such thing."""
        name = self.name(field)
        return RequestError(f"{name or 'the body'} is not {what}", "Check its type.", param=name, code="invalid_type")

    def has(self, field: str) -> bool:
        """Whether it is given."""
        return field in self._given

    def raw(self, field: str) -> Any:
        """Return whatever is given; None where nothing is."""
        self._read.add(field)
        return self._given.get(field)

    def text(self, field: str) -> str | None:
        """Return a text."""
        value = self.raw(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, "a text")
        return value

    def needed_text(self, field: str) -> str:
        """Return a text that has to be there."""
        if (value := self.text(field)) is None:
            raise self.missing(field)
        return value

    def missing(self, field: str) -> RequestError:
        """Return the error for a field that has to be there."""
        return RequestError(f"{self.name(field)} is missing", "Give it.", param=self.name(field), code="missing_field")

    def flag(self, field: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.raw(field)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return default if value is None else value

    def whole(self, field: str, least: int = 0, most: int | None = None) -> int | None:
        """Return a whole number within bounds."""
        value = self.raw(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(field, "a whole number")
        if value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise RequestError(f"{self.name(field)} {value} is out of range", f"Use {bounds}.", param=self.name(field))
        return value

    def items(self, field: str) -> list[Any] | None:
        """Return a list."""
        value = self.raw(field)
        if value is not None and not isinstance(value, list):
            raise self.wrong(field, "a list")
        return value

    def inner(self, field: str) -> "Fields | None":
        """Return an object's fields."""
        value = self.raw(field)
        return None if value is None else Fields(value, self.name(field))

    def each(self, field: str) -> list["Fields"]:
        """Return the fields of each object of a list."""
        return [Fields(item, f"{self.name(field)}[{at}]") for at, item in enumerate(self.items(field) or ())]

    def texts(self, field: str) -> tuple[str, ...] | None:
        """Return texts: one, or a list of them."""
        value = self.raw(field)
        if value is None:
            return None
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(field, "a text or a list of texts")
        return tuple(found)

    def one_of(self, field: str, allowed: Collection[str]) -> str | None:
        """Return one of some words."""
        value = self.text(field)
        if value is not None and value not in allowed:
            raise unsupported(self.name(field), repr(value)[:80], f"Use {', '.join(allowed)}.")
        return value

    def only(self, field: str, *allowed: object) -> None:
        """Read a field of which only these values, or none, can be honoured."""
        value = self.raw(field)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            raise unsupported(self.name(field), f"{json.dumps(value)[:60]}")

    def idle(self, *fields: str) -> None:
        """Read fields that change no reply: names for a client's own book-keeping, and wishes that are met in any case."""
        self._read.update(fields)

    def refuse(self, fields: Iterable[str], why: str) -> None:
        """Raise RequestError where one of these is given."""
        for field in fields:
            if self.has(field):
                raise RequestError(f"{self.name(field)} is not supported: {why}", "Leave it out.",
                                   param=self.name(field), code="unsupported_field")  # fmt: skip

    def done(self) -> None:
        """Raise RequestError where a field is left that nobody read."""
        if left := sorted(self._given.keys() - self._read):
            name = self.name(left[0])
            raise RequestError(f"{name} is not supported", "Leave it out.", param=name, code="unsupported_field")
