"""The radix tree under the prompt cache, against a plain list of what was put in."""

from hypothesis import given
from hypothesis import strategies as st

from tokamac.engine.prompt_cache.radix_tree import Node, common_prefix, insert, match_prefix, remove, split

runs = st.lists(st.integers(0, 2), max_size=12)


def root() -> Node[str]:
    return Node([], None, 0, "")


def put(tree: Node[str], ids: list[int]) -> None:
    node, at = match_prefix(tree, ids)
    if at < node.stop:
        node = split(node, at, "", node.value)
    if at < len(ids):
        insert(node, ids[at:], "")


def leading(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(runs, runs)
def test_the_common_prefix_is_what_counting_finds(a: list[int], b: list[int]) -> None:
    assert common_prefix(a, b) == leading(a, b)


@given(st.lists(runs, max_size=12), runs)
def test_the_longest_known_prefix_is_found_at_any_length(held: list[list[int]], wanted: list[int]) -> None:
    tree = root()
    for ids in held:
        put(tree, ids)
    node, at = match_prefix(tree, wanted)
    assert at == max((leading(ids, wanted) for ids in held), default=0)
    assert node.ids()[:at] == wanted[:at]
    assert node.start <= at <= node.stop


@given(st.lists(runs, min_size=1, max_size=12))
def test_every_beginning_is_held_once(held: list[list[int]]) -> None:
    tree = root()
    for ids in held:
        put(tree, ids)
    prefixes = {tuple(ids[:length]) for ids in held for length in range(1, len(ids) + 1)}
    assert sum(len(node.tokens) for node in tree.subtree()) == len(prefixes)
    assert all(node.stop == node.start + len(node.tokens) == len(node.ids()) for node in tree.subtree())


def test_what_is_removed_is_gone_with_all_below_it() -> None:
    tree = root()
    for ids in ([1, 2, 3], [1, 2, 4], [5]):
        put(tree, ids)
    remove(tree.children[1])
    assert match_prefix(tree, [1, 2, 3]) == (tree, 0)
    assert match_prefix(tree, [5])[1] == 1
