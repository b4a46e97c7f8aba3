"""How large the house is, and how much of it tests reach into: each number stands in house.toml, and may only fall there.

``make house`` prints them.
"""

import ast
import inspect
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tokamac import engine, quant

ROOT = Path(__file__).parents[1]
PRODUCT = ("app", "engine", "quant", "assets")
LIMITS: dict[str, float] = tomllib.loads((ROOT / "tests" / "house.toml").read_text(encoding="utf-8"))
REPLY_PATH: dict[str, int] = LIMITS.pop("reply_path")  # type: ignore[assignment]  # tests/engine/test_reply_path.py measures it
PATCHES = {"setattr", "setitem", "delattr", "delitem"}


@cache
def parsed(*folders: str) -> dict[Path, tuple[int, ast.Module]]:
    """Return the lines and the tree of each file."""
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    return {file: (len(text.splitlines()), ast.parse(text)) for file, text in texts.items()}


def lines(*folders: str) -> int:
    return sum(count for count, _ in parsed(*folders).values())


def nodes(*folders: str) -> Iterator[ast.AST]:
    return (node for _, tree in parsed(*folders).values() for node in ast.walk(tree))


def docstring_words_a_line() -> float:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in nodes(*PRODUCT) if isinstance(node, documented))
    return round(sum(len(text.split()) for text in texts if text) / lines(*PRODUCT), 2)


def is_private(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    )


def is_patch(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PATCHES):
        return False
    return isinstance(node.func.value, ast.Name) and "patch" in node.func.value.id


MEASURED: dict[str, Callable[[], float]] = {
    "product_lines": lambda: lines(*PRODUCT),
    "docstring_words_a_line": docstring_words_a_line,
    "test_lines": lambda: lines("tests") - lines("tests/bench"),  # which measures, and tests nothing
    "private_accesses": lambda: sum(map(is_private, nodes("tests"))),
    "patches": lambda: sum(map(is_patch, nodes("tests"))),
}


def test_every_limit_is_measured() -> None:
    assert MEASURED.keys() == LIMITS.keys()


@pytest.mark.parametrize("name", MEASURED)
def test_the_house_grows_no_larger(name: str) -> None:
    found = MEASURED[name]()
    print(f"{name}: {found:,} of {LIMITS[name]:,}")
    assert found <= LIMITS[name], "make it less, or let house.toml say why more is needed"


def public_without_docstring() -> Iterator[str]:
    for package in (engine, quant):
        for name in package.__all__:
            thing = getattr(package, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            own = {f"{name}.{key}": value for key, value in vars(thing).items()} if inspect.isclass(thing) else {}
            for full, value in {name: thing, **own}.items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                private = full.rpartition(".")[2].startswith("_")
                if (inspect.isfunction(function) or inspect.isclass(value)) and not private and not function.__doc__:
                    yield full


def test_what_is_public_is_documented() -> None:
    assert list(public_without_docstring()) == []
