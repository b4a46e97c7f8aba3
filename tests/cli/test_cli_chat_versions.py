"""``tokamac chat --plain``: versions of a chat as an outline, an edit that keeps what is for the next prompt, chats deleted and
brought back.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.plain_chat import Terminal, last_path, piped
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.conversation import Reply, Tree
from tokamac.app.chat.recording import LEFT
from tokamac.app.plain.commands import outline
from tokamac.app.plain.console import LineComposer
from tokamac.app.store import messages
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment

pytestmark = pytest.mark.usefixtures("data")

KILL_LINE = "\x15"


def prompts(data: Path) -> list[tuple[str, list[str]]]:
    """The prompts of the chat used last, and the texts that went with them."""
    return [(m.text, [each.text for each in m.attachments]) for m in last_path(data) if m.role == "user"]


# Versions ---------------------------------------------------------------------------------------------------------------


def reply(tree: Tree, prompt: int, text: str) -> int:
    key = tree.answer(prompt).key
    tree.end(key, Reply(text, model="org/m"))
    return key


def test_what_has_no_version_beside_it_is_not_in_the_outline() -> None:
    tree = Tree()
    first = tree.ask("a", None).key
    second = tree.ask("b", reply(tree, first, "A")).key
    reply(tree, second, "B")
    assert outline(tree).lines == ()
    reply(tree, second, "")
    assert outline(tree).lines == (
        "1. turn 2, m, version 1 of 2: B",
        "2. turn 2, m, version 2 of 2, shown now: no text",
    )


def test_versions_stand_inside_the_version_that_they_follow() -> None:
    tree = Tree()
    first = tree.ask("a", None).key
    reply(tree, tree.ask("c", reply(tree, first, "A")).key, "C")
    reply(tree, tree.ask("d\x1b[2J\nd", 2).key, "D")
    last = tree.ask("", None, (Attachment("notes.md", "text"),)).key
    reply(tree, last, "x" * 50)
    found = outline(tree)
    assert found.lines == (
        "1. turn 1, you, version 1 of 2: a",
        "  2. turn 2, you, version 1 of 2: c",
        "  3. turn 2, you, version 2 of 2: d� d",
        "4. turn 1, you, version 2 of 2, shown now: notes.md",
    )
    assert [tree.nodes[key].prompt for key in found.keys] == ["a", "c", "d\x1b[2J\nd", ""]


def test_a_path_longer_than_pythons_stack_is_listed() -> None:
    tree = Tree()
    for number in range(2000):
        head = tree.ask(str(number), tree.head).key
        reply(tree, head, "x")
    reply(tree, tree.ask("other", None).key, "y")
    assert len(outline(tree).lines) == 2


def test_branches_lists_the_versions_and_goes_to_one_and_the_chat_goes_on_there(data: Path) -> None:
    status, out, err = piped("one\n/again\n/edit uno\n/branches\n/branches 2\n/branches 9\nand two\n", "fast")
    assert status == 0
    lines = out.splitlines()
    at = lines.index("1. turn 1, you, version 1 of 2: one")
    assert [line.split(":")[0] for line in lines[at : at + 4]] == [
        "1. turn 1, you, version 1 of 2",
        "  2. turn 1, fast, version 1 of 2",
        "  3. turn 1, fast, version 2 of 2",
        "4. turn 1, you, version 2 of 2, shown now",
    ]
    assert lines[at + 4] == "you (version 1 of 2): one"
    assert lines[at + 5].startswith("fast (version 1 of 2): Decode reads")
    assert "There is no version 9: /branches lists them, 1 to 4." in err
    assert [text for text, _ in prompts(data)] == ["one", "and two"]


def test_numbers_stay_those_that_were_listed(data: Path) -> None:
    """The versions that /again makes stand before the prompt "uno", which was the second of the list."""
    piped("one\n/edit uno\n/branches\n/branches 1\n/again\n/branches 2\nmore\n", "fast")
    assert [text for text, _ in prompts(data)] == ["uno", "more"]


def test_a_chat_without_versions_says_so() -> None:
    _, out, err = piped("/branches\none\n/branches\n/branches 1\n", "fast")
    assert "version 1" not in out
    assert err.count("There is only one version") == 3


# Editing ----------------------------------------------------------------------------------------------------------------


def test_an_edit_leaves_what_is_attached_to_the_next_prompt(data: Path, notes: Path) -> None:
    status, _, err = piped(f"one\n/attach {notes}\n/edit uno\nand these?\n", "fast")
    assert (status, err.count("\n")) == (0, 1)
    assert prompts(data) == [("uno", []), ("and these?", ["keys and values"])]


def test_an_edit_that_is_not_written_takes_nothing(data: Path, notes: Path) -> None:
    _, _, err = piped(f"one\n/attach {notes}\n/edit\nand these?\n", "fast")
    assert "Write the new prompt after the command" in err
    assert prompts(data) == [("one", []), ("and these?", ["keys and values"])]


def test_an_edit_that_is_given_up_gives_back_what_was_attached(
    terminal: Callable[..., Terminal], data: Path, notes: Path
) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", f"/attach {notes}\n", "/edit\n", "\x03", "and these?\n", "\x04"):
        chat.until("you> ")
        chat.type(text)
    assert chat.left() == 0
    assert prompts(data) == [("one", []), ("and these?", ["keys and values"])]


def test_what_is_attached_is_kept_with_the_chat_that_is_left_in_an_edit(
    terminal: Callable[..., Terminal], data: Path, notes: Path
) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", f"/attach {notes}\n", "/edit\n", "\x04"):
        chat.until("you> ")
        chat.type(KILL_LINE + text if text == "\x04" else text)
    assert chat.left() == 0
    with Store.open(data) as store:
        (kept,) = store.chats()
    assert "keys and values" in kept.draft
    assert "one" not in kept.draft


def test_what_is_attached_during_an_edit_goes_with_the_edit() -> None:
    composer, later, now = LineComposer(), Attachment("later.md", "l"), Attachment("now.md", "n")
    composer.hold(Draft("words", (later,)))
    composer.begin_edit(1, Draft("old"))
    assert composer.unsent == Draft("words", (later,))
    composer.draft = Draft("old", (now,))
    composer.begin_edit(2, composer.draft)  # another one, and nothing of the first is for the next prompt
    composer.give_back(Draft("waited"))
    composer.end_edit()
    assert composer.draft == Draft("waited\n\nwords", (later,))
    assert composer.editing is None
    composer.end_edit()
    assert composer.draft.text == "waited\n\nwords"


# Deleting ---------------------------------------------------------------------------------------------------------------


def titles(data: Path, *, deleted: bool = False) -> list[str]:
    with Store.open(data) as store:
        return [chat.title for chat in store.chats(deleted=deleted)]


def test_this_chat_is_deleted_and_another_begins(data: Path) -> None:
    status, _, err = piped("about apples\n/delete\nabout pears\n", "fast")
    assert status == 0
    assert "Deleted: about apples (" in err
    assert titles(data) == ["about pears"]
    assert titles(data, deleted=True) == ["about apples"]


def test_the_chat_that_was_deleted_last_comes_back_and_is_open(data: Path) -> None:
    _, _, err = piped("apples\n/delete\npears\n/delete\n/restore\nmore\n/restore\n/restore\n", "fast")
    assert err.count("Restored: ") == 2
    assert err.splitlines()[-1] == "No chat is deleted."
    assert titles(data, deleted=True) == []
    with Store.open(data) as store:
        pears = next(chat for chat in store.chats() if chat.title == "pears")
        assert [m.text for m in store.path(pears.id) if m.role == "user"] == ["pears", "more"]


def test_a_chat_is_deleted_and_brought_back_by_its_place_in_the_list_or_its_id(data: Path) -> None:
    piped("apples\n/new\npears\n/chats apples\n/delete 1\nplums\n", "fast")
    assert (titles(data), titles(data, deleted=True)) == (["pears"], ["apples"])
    with Store.open(data) as store:
        (apples,) = store.chats(deleted=True)
        (pears,) = store.chats()
    _, _, err = piped(f"/delete {apples.id}\n/restore {apples.id[:6]}\nfigs\n/restore {pears.id}\n/delete zz\n", "fast")
    assert [line.partition(":")[0] for line in err.splitlines()[:3]] == [
        "This chat is already deleted",
        "Restored",
        "This chat is not deleted",
    ]
    assert "No chat has an id that begins with zz" in err
    assert [text for text, _ in prompts(data)] == ["apples", "figs"]


def test_a_number_beyond_the_list_is_not_the_beginning_of_an_id(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ID_CHARS", "3")  # which is in every other id
    with Store.open(data) as store:
        store.add_message(store.new_chat().id, None, "user", "apples")
    status, _, err = piped("/delete 3\n/chats\n/delete 33\n/open 2\n/restore 0\n", "fast")
    assert status == 0
    said = [f"There is no number {number} in the last list. /chats lists them." for number in (3, 33, 2, 0)]
    assert err.splitlines() == said
    assert titles(data) == ["apples"]
    piped("/delete 33333333\n", "fast")  # a whole id, which is no number of a list
    assert titles(data, deleted=True) == ["apples"]


def test_a_number_of_thousands_of_digits_is_refused_and_the_chat_goes_on(data: Path) -> None:
    endless = "1" * 5000
    status, _, err = piped(f"one\n/again\n/open {endless}\n/delete {endless}\n/branches {endless}\ntwo\n", "fast")
    assert status == 0
    first, second, third = err.splitlines()
    assert first == second
    assert "is no id of a chat" in first
    assert third == f"There is no version {'1' * 40}: /branches lists them, 1 to 2."
    assert [text for text, _ in prompts(data)] == ["one", "two"]


def test_what_is_attached_is_deleted_with_the_chat_and_comes_back_with_it(data: Path, notes: Path) -> None:
    _, _, err = piped(f"apples\n/attach {notes}\n/delete\npears\n/restore\nand these?\n", "fast")
    assert "). This is a new chat. /restore restores the old one with your unsent prompt.\n" in err
    assert err.count(LEFT) == 0
    assert prompts(data) == [("apples", []), ("and these?", ["keys and values"])]


def test_there_is_nothing_to_delete_in_a_chat_in_which_nothing_was_said(data: Path) -> None:
    _, _, err = piped("/delete\n/restore\n", "fast")
    assert err.splitlines() == ["There is nothing to delete yet.", "No chat is deleted."]
    assert titles(data) == []


def test_what_was_deleted_too_long_ago_is_not_there_to_come_back(data: Path) -> None:
    piped("apples\n/delete\n", "fast")
    with Store.open(data, clock=lambda: time.time() + 40 * 86400) as store:
        assert store.purge() == 1
    _, _, err = piped("/restore\n", "fast")
    assert err == "No chat is deleted.\n"
