"""The versions of a conversation as a numbered outline: each message that stands beside others, and inside it those that follow."""

from collections.abc import Iterator
from dataclasses import dataclass

from tokamac.app.tui.listing import EXCERPT
from tokamac.app.tui.one_line import said_in
from tokamac.app.tui.tree import Tree


@dataclass(frozen=True, slots=True)
class Outline:
    """The versions of ``tree`` as they were listed: ``keys`` of the messages by their numbers, and a line for each."""

    tree: Tree
    keys: tuple[int, ...]
    lines: tuple[str, ...]


def outline(tree: Tree) -> Outline:
    """Return the outline as it is now."""
    read = {node.key for node in tree.path_to(tree.head)}
    keys, lines = [], []
    for key, depth in _versions(tree):
        keys.append(key)
        lines.append(f"{'  ' * depth}{len(keys)}. {_line(tree, key, read=key in read)}")
    return Outline(tree, tuple(keys), tuple(lines))


def _versions(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield every message that has another beside it, and in how many of such it is."""
    todo: list[tuple[int | None, int]] = [(None, 0)]
    while todo:  # a loop: a path may be longer than Python's stack
        at, depth = todo.pop()
        if at is not None and len(tree.siblings(at)) > 1:
            yield at, depth
            depth += 1
        todo += [(key, depth) for key in reversed(tree.children(at))]


def _line(tree: Tree, key: int, *, read: bool) -> str:
    number, many = tree.place(key)
    turn = sum(each.prompt is not None for each in tree.path_to(key))
    who, said = said_in(tree.nodes[key], EXCERPT)
    return f"turn {turn}, {who}, version {number} of {many}{', read now' if read else ''}: {said}"
