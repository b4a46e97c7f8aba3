"""What a model class, mlx-lm's or ours, reads of its config, found in its source: fields of its arguments that its code uses."""

import ast
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tokamac.engine.architectures import MODEL_MODULES


def read_by(args_class: type[Any]) -> frozenset[str]:
    """Return the fields of a class's arguments that its source uses."""
    module = importlib.import_module(args_class.__module__)
    fields = {field.name for field in dataclasses.fields(args_class)}
    return frozenset(fields & {name for part in modules(module) for name in _uses(part)})


@functools.cache
def read_within(module: ModuleType) -> frozenset[str]:
    """Return what any arguments class in reach of a module has as a field and uses: for configs nested in another."""
    parts = modules(module)
    fields = {
        field.name
        for part in parts
        for value in vars(part).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
        for field in dataclasses.fields(value)
    }
    return frozenset(fields & {name for part in parts for name in _uses(part)})


@functools.cache
def modules(module: ModuleType) -> tuple[ModuleType, ...]:
    """Return a model's module and those of the models it builds on."""
    found: dict[str, ModuleType] = {}
    queue = [module]
    while queue:
        part = queue.pop()
        if part.__name__ in found:
            continue
        found[part.__name__] = part
        for value in vars(part).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
            near = importlib.import_module(name) if str(name).startswith(MODEL_MODULES) else None
            if near is not None and hasattr(near, "ModelArgs"):
                queue.append(near)
    return tuple(found.values())


@functools.cache
def _uses(module: ModuleType) -> frozenset[str]:
    """Parsed once: to parse a module takes longer than all else that is done with a config."""
    return frozenset(_names(ast.parse(inspect.getsource(module))))


def _names(source: ast.Module) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
