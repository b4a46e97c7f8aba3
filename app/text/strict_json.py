"""Strict JSON to frozen dataclasses; their type hints are the schema."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class ShapeError(ValueError):
    """A value doesn't match its class; the message names the field."""


def build(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(hint), value, where)
    if origin is Literal:
        # 1 == True in Python: the type is compared too.
        if any(value == choice and type(value) is type(choice) for choice in get_args(hint)):
            return value
        raise ShapeError(f"{where}: {value!r} is not one of {get_args(hint)}")
    if origin is tuple:
        if not isinstance(value, list):
            raise ShapeError(f"{where}: not a list")
        if (hints := get_args(hint))[-1] is not Ellipsis:
            if len(hints) != len(value):
                raise ShapeError(f"{where}: not a list of {len(hints)}")
            return tuple(
                build(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(zip(hints, value, strict=True))
            )
        each = get_args(hint)[0]
        if each is int and set(map(type, value)) <= {int}:  # token ids: there may be a million
            return tuple(value)
        if each == tuple[int, float] and (pairs := _numbers(value)) is not None:  # biases of the whole vocabulary
            return pairs
        return tuple(build(each, item, f"{where}[{i}]") for i, item in enumerate(value))
    if is_dataclass(hint) and isinstance(hint, type):
        return _instance(hint, value, where)
    return _plain(hint, value, where)


def _numbers(value: list[Any]) -> tuple[tuple[int, float], ...] | None:
    """Return pairs checked all at once; None where one is odd."""
    if set(map(type, value)) != {list} or set(map(len, value)) != {2}:
        return None
    first, second = zip(*value, strict=True)
    plain = set(map(type, first)) == {int} and set(map(type, second)) == {float} and all(map(math.isfinite, second))
    return tuple(zip(first, second, strict=True)) if plain else None


def _plain(hint: Any, value: Any, where: str) -> Any:
    if hint is Path and type(value) is str:
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is type(None) and value is None:
        return None
    if hint is float and type(value) is float and not math.isfinite(value):
        raise ShapeError(f"{where}: {value!r} is not a number here")  # JSON's 1e999 is Python's infinity
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    raise ShapeError(f"{where}: {value!r:.60} is not {getattr(hint, '__name__', hint)}")


def _one_of(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    kinds = {tag(hint): hint for hint in hints if is_dataclass(hint)}
    if len(kinds) > 1:
        return _tagged(kinds, value, where)
    reasons = []
    for hint in hints:
        try:
            return build(hint, value, where)
        except ShapeError as error:
            reasons.append(str(error))
    raise ShapeError(reasons[0])


def _tagged(kinds: Mapping[str, Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ShapeError(f"{where}: not an object")
    name = value.get("type")
    if not isinstance(name, str) or name not in kinds:
        raise ShapeError(f"{where}: unknown type {name!r:.80}")
    return _instance(kinds[name], {key: item for key, item in value.items() if key != "type"}, where)


def tag(kind: Any) -> str:
    return str(kind.__name__).lower()


def _instance(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ShapeError(f"{where}: not an object")
    shape = _shape(kind)
    if unknown := value.keys() - shape.keys():
        raise ShapeError(f"{where}: unknown field {sorted(unknown)[0]!r}")
    if missing := {name for name, (_, required) in shape.items() if required} - value.keys():
        raise ShapeError(f"{where}: no field {sorted(missing)[0]!r}")
    return kind(**{name: build(shape[name][0], item, f"{where}.{name}") for name, item in value.items()})


@cache
def _shape(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }
