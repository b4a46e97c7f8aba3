"""A radix tree over token ids: runs of tokens with shared prefixes, each with a value. No MLX here.

A node's run begins where its parent's ends; the root's is empty. Lookups compare whole lists at the speed of C, so a prompt of
tens of thousands of tokens takes well under a millisecond, however many prefixes the tree holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Node(Generic[T]):
    """A run of tokens after ``parent``. start: position of its first token. last_used: a count, larger is later."""

    tokens: list[int]
    parent: "Node[T] | None"
    start: int
    value: T
    children: dict[int, "Node[T]"] = field(default_factory=dict)
    last_used: int = 0

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def path(self) -> list["Node[T]"]:
        """Return the nodes from the root's child down to this one; [] for the root."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def ids(self) -> list[int]:
        """Return all tokens from the root to this node's end."""
        return [token for node in self.path() for token in node.tokens]

    def subtree(self) -> Iterator["Node[T]"]:
        """Yield this node and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading ids ``a`` and ``b`` share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def match_prefix(root: Node[T], ids: list[int]) -> tuple[Node[T], int]:
    """Return the node in which the longest known prefix of ``ids`` ends, and that prefix's length.

    The prefix may end inside the node's run. Where nothing matches, the node is the root and the length 0.
    """
    node, at = root, 0
    while at < len(ids) and (child := node.children.get(ids[at])) is not None:
        shared = common_prefix(child.tokens, ids[at : at + len(child.tokens)])
        at += shared
        node = child
        if shared < len(child.tokens):
            break
    return node, at


def insert(parent: Node[T], tokens: list[int], value: T) -> Node[T]:
    """Add a run below ``parent``, where no other child begins with the same token."""
    if not tokens or tokens[0] in parent.children:
        raise ValueError("a run must begin with a token that no sibling begins with")
    node = Node(tokens, parent, parent.stop, value)
    parent.children[tokens[0]] = node
    return node


def split(node: Node[T], at: int, upper: T, lower: T) -> Node[T]:
    """Split a node at position ``at`` inside its run; return the upper part, a new node. ``node`` becomes the lower one."""
    count = at - node.start
    if not 0 < count < len(node.tokens) or node.parent is None:
        raise ValueError(f"position {at} is not inside the run {node.start}…{node.stop}")
    above = Node(node.tokens[:count], node.parent, node.start, upper, last_used=node.last_used)
    node.parent.children[above.tokens[0]] = above
    node.tokens, node.start, node.value, node.parent = node.tokens[count:], at, lower, above
    above.children[node.tokens[0]] = node
    return above


def remove(node: Node[T]) -> None:
    """Remove a node and all below it."""
    if node.parent is None:
        raise ValueError("the root can't be removed")
    del node.parent.children[node.tokens[0]]
    node.parent = None
