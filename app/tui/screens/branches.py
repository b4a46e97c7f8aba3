"""F6: the conversation as a tree. What goes on without another version stands in one column; versions open below each other.

Beside a version stands what going on along its path would take, as soon as the engine has told it.
"""

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Tree as TreeView
from textual.widgets.tree import TreeNode

from tokamac.app.tui.one_line import said_in
from tokamac.app.tui.prices import of_path
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.tree import Tree
from tokamac.engine.price import Price

WORDS = 60
"""Characters of a message that are shown."""
HERE, ELSEWHERE = "● ", "○ "
LOOK_S = 0.2
"""How often it is looked which versions are in view, and which prices have come."""

Pricing = Callable[[Sequence[int]], Mapping[int, Price]]
"""Returns the prices that are known so far, and has the engine asked, aside, for those of the messages given."""


class BranchesScreen(Dialog[int]):
    """Shows all paths, and which one is read. The result is the message to go to."""

    def __init__(self, tree: Tree, pricing: Pricing) -> None:
        super().__init__()
        self._tree = tree
        self._pricing = pricing
        self._found: dict[int, TreeNode[int]] = {}
        self._priced: set[int] = set()

    def compose(self) -> ComposeResult:
        """Yield the tree."""
        with Vertical(classes="box") as box:
            box.border_title = "Branches"
            view: TreeView[int] = TreeView("")
            view.show_root = False
            view.auto_expand = False  # Enter goes there
            view.guide_depth = 2
            yield view

    def on_mount(self) -> None:
        """Fill it, point at where the conversation stands, and name the keys."""
        view: TreeView[int] = self.query_one(TreeView)
        self._found = fill(view.root, self._tree)
        view.root.expand()
        view.focus()
        if self._tree.head is not None:
            self.call_after_refresh(view.move_cursor, self._found[self._tree.head])
        self.set_interval(LOOK_S, self._look)
        self.say_keys("Enter reads that path", "Space folds", "● is read now", "Esc closes")

    def _look(self) -> None:
        """Write the prices that have come beside their versions; ask for those of the versions that are in view now."""
        for key, price in self._pricing(self._in_view()).items():
            if key not in self._priced:
                self._priced.add(key)
                self._found[key].set_label(line(self._tree, key, here=self._is_read(key), price=price))

    def _in_view(self) -> list[int]:
        view: TreeView[int] = self.query_one(TreeView)
        top = view.scroll_offset.y
        nodes = (view.get_node_at_line(row) for row in range(top, top + view.size.height))
        keys = (node.data for node in nodes if node is not None)
        return [key for key in keys if key is not None and self._tree.place(key)[1] > 1]

    def _is_read(self, key: int) -> bool:
        return any(node.key == key for node in self._tree.path_to(self._tree.head))

    @on(TreeView.NodeSelected)
    def chosen(self, event: TreeView.NodeSelected[int]) -> None:
        """Close with the message."""
        if event.node.data is not None:
            self.dismiss(event.node.data)


def fill(root: TreeNode[int], tree: Tree) -> dict[int, TreeNode[int]]:
    """Add the whole conversation below ``root``; return its nodes by the messages they show."""
    read = {node.key for node in tree.path_to(tree.head)}
    made: dict[int, TreeNode[int]] = {}
    todo: list[tuple[TreeNode[int], int | None]] = [(root, None)]
    while todo:  # a loop: a path may have more versions on it than Python has stack
        holder, at = todo.pop()
        while len(after := tree.children(at)) == 1:
            at = after[0]
            made[at] = holder.add_leaf(line(tree, at, here=at in read), data=at)
        for key in after:
            goes_on = bool(tree.children(key))
            made[key] = holder.add(line(tree, key, here=key in read), data=key, expand=True, allow_expand=goes_on)
            todo.append((made[key], key))
    return made


def line(tree: Tree, key: int, *, here: bool, price: Price | None = None) -> Text:
    """Return the line of a message: whether it is read, who says it, which version it is, its price, and how it begins."""
    (number, many), (who, said) = tree.place(key), said_in(tree.nodes[key], WORDS)
    version = f" ‹{number} of {many}›" if many > 1 else ""
    return Text.assemble(
        HERE if here else ELSEWHERE,
        (f"{who}{version}", "bold" if here else ""),
        ("" if price is None else f" · {of_path(price)}", "dim"),
        (f"  {said}", "" if here else "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
