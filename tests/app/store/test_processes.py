"""Several programs on one file of chats: the chat is open while commands come and go, and all end in every way."""

import json
import random
import shutil
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, permutations
from pathlib import Path
from typing import Any

import pytest

from tests.app.store.actors import Actor, App, Both, Shell
from tokamac.app.chat.recording import REPLACED
from tokamac.app.store.store import Store

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which files a process has open")


@pytest.fixture
def start(file: Path) -> Iterator[Callable[[Callable[[Path], Any]], Actor]]:
    made: list[Actor] = []

    def begin(kind: Callable[[Path], Any]) -> Actor:
        made.append(Actor(kind, file))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


Start = Callable[[Callable[[Path], Any]], Actor]


def kept(file: Path) -> Counter[str]:
    """All messages, as a program reads them that was not there before; the file is whole."""
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        return Counter(text for (text,) in connection.execute("SELECT text FROM messages"))


def said(*prompts: str) -> Counter[str]:
    return Counter(text for prompt in prompts for text in (prompt, f"re: {prompt}"))


def say(app: Actor, *prompts: str) -> None:
    for prompt in prompts:
        app("ask", prompt)
        app("reply")


def exported(folder: Path, name: str) -> Path:
    """A file to import."""
    path = folder / f"{name}.md"
    path.write_text(f"# {name}\n\n## User\n\n{name}\n\n## Assistant\n\nre: {name}\n", encoding="utf-8")
    return path


COMMANDS = ("list", "search one", "show CHAT", "import FILE", "delete CHAT", "restore CHAT", "repair")


@on_linux
def test_no_command_takes_the_log_from_an_app_that_is_open(start: Start, file: Path, tmp_path: Path) -> None:
    app, shell = start(App), start(Shell)
    say(app, "one")
    app("listed")  # a second connection in the app, opened and closed
    log, before = file.with_name("chats.db-wal"), app("files")
    inode = log.stat().st_ino
    assert str(log) in before
    told = {"CHAT": app("chat"), "FILE": str(exported(tmp_path, "two"))}
    for command in COMMANDS:
        status, _, err = shell("run", "chats", *(told.get(word, word) for word in command.split()))
        assert (status, err) == (0, ""), command
        assert (app("files"), log.stat().st_ino) == (before, inode), command
    say(app, "three")
    app.kill()
    assert kept(file) == said("one", "two", "three")


@pytest.mark.parametrize("order", list(permutations(("app ends", "app is killed", "import", "list"), 4)), ids="-".join)
def test_all_is_kept_in_whatever_order_they_end(
    start: Start, file: Path, tmp_path: Path, order: tuple[str, ...]
) -> None:
    ends, killed, shell = start(App), start(App), start(Shell)
    say(ends, "one")
    say(killed, "two")
    assert ends("listed") == killed("listed") == ["two", "one"]
    for step in order:
        if step == "app ends":
            ends.end()
        elif step == "app is killed":
            killed.kill()
        else:
            given = ("import", str(exported(tmp_path, "three"))) if step == "import" else ("list",)
            assert shell("run", "chats", *given)[0] == 0
        for app, prompt in ((ends, f"{step} one"), (killed, f"{step} two")):
            if app.process.is_alive():
                say(app, prompt)
    after_end, after_kill = order.index("app ends"), order.index("app is killed")
    assert kept(file) == said(
        "one",
        "two",
        "three",
        *(f"{step} one" for step in order[:after_end]),
        *(f"{step} two" for step in order[:after_kill]),
    )


def test_two_apps_see_each_others_chats_at_the_next_poll(start: Start) -> None:
    one, two = start(App), start(App)
    assert (one("poll"), two("poll")) == ((False, []), (False, []))
    say(one, "by one")
    assert two("poll") == (True, ["by one"])
    assert two("poll") == (False, ["by one"])
    say(two, "by two")
    assert one("poll") == (True, ["by two", "by one"])
    assert one("hints") == two("hints") == []


def interleave(start: Start, file: Path, folder: Path, seed: int) -> None:
    """Two apps and the command line do what chance says; all that they were told is stored is there at the end."""
    chance, number = random.Random(seed), count(1)
    expected: Counter[str] = Counter()
    apps: list[Actor] = [start(App), start(App)]
    shell = start(Shell)
    waiting: dict[int, str] = {}
    known: list[str] = []

    def prompt(app: Actor) -> None:
        text = f"prompt {next(number)}"
        app("ask", text)
        waiting[id(app)] = text
        expected[text] += 1

    def reply(app: Actor) -> None:
        app("reply")
        expected[f"re: {waiting.pop(id(app))}"] += 1

    def leave(app: Actor, end: Callable[[], None]) -> None:
        end()
        if waiting.pop(id(app), None) is not None:
            expected[""] += 1  # a reply of which nothing had come is kept, as stopped
        apps[apps.index(app)] = start(App)

    def command(name: str) -> None:
        chat = chance.choice(known) if known else None
        given = {"import": [str(exported(folder, f"import {next(number)}"))], "search": ["prompt"]}.get(name, [])
        if name in ("show", "delete", "restore"):
            if chat is None:
                return
            given = [chat]
        status, out, err = shell("run", "chats", name, *given, "--json")
        assert status == 0, (name, err)
        if name == "import":
            made = json.loads(out)
            known.append(made["id"])
            expected.update(said(Path(given[0]).stem))

    for _ in range(30):
        app = chance.choice(apps)
        acts: list[Callable[[], object]] = [
            *[lambda app=app: reply(app) if id(app) in waiting else prompt(app)] * 4,
            lambda app=app: app("poll"),
            lambda app=app: app("listed"),
            lambda app=app: id(app) in waiting or app("new"),
            lambda app=app: leave(app, app.end),
            lambda app=app: leave(app, app.kill),
            *[lambda: command(chance.choice(("list", "search", "show", "import", "delete", "restore", "repair")))] * 3,
        ]
        chance.choice(acts)()
        if (chat := app("chat") if app.process.is_alive() else None) is not None and chat not in known:
            known.append(chat)
    for app in chance.sample(apps, k=len(apps)):
        if id(app) in waiting:
            expected[""] += 1
        chance.choice((app.end, app.kill))()
    Store.open(file).close()  # replies of those that were killed are stopped
    assert kept(file) == expected, f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_in_a_random_order(start: Start, file: Path, tmp_path: Path, seed: int) -> None:
    interleave(start, file, tmp_path, seed)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_nothing_is_lost_in_200_random_orders(start: Start, file: Path, tmp_path: Path) -> None:
    for seed in range(10, 210):
        interleave(start, file, tmp_path, seed)
        shutil.rmtree(file.parent)


# A file, or a log, that is taken away from an app that is open.


def without_log(file: Path) -> None:
    """The log is removed, and with it what is only in there."""
    for tail in ("-wal", "-shm"):
        Path(f"{file}{tail}").unlink()


def without_locks(file: Path) -> None:
    """The log is merged and removed by a program that takes itself for the only one, and another one writes."""
    for tail in ("-wal", "-shm"):
        shutil.copy(f"{file}{tail}", f"{file}-copy{tail}")
    shutil.copy(file, f"{file}-copy")
    with closing(sqlite3.connect(f"{file}-copy")) as copy:
        copy.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    without_log(file)
    with file.open("r+b") as here:
        here.write(Path(f"{file}-copy").read_bytes())
    with Store.open(file) as store:
        store.add_message(store.new_chat().id, None, "user", "from outside")


def with_an_older_file(file: Path) -> None:
    """Another file, which has nothing of this evening, comes in its place."""
    without_log(file)
    other = file.with_name("older.db")
    with Store.open(other) as store:
        store.add_message(store.new_chat().id, None, "user", "from outside")
    other.replace(file)


def without_anything(file: Path) -> None:
    shutil.rmtree(file.parent)


def set_aside(file: Path) -> None:
    Store.set_aside(file)


@pytest.mark.parametrize("taken", [without_log, without_locks, with_an_older_file, without_anything, set_aside])
@pytest.mark.parametrize("notices", ["poll", "prompt", "reply", "end"])
def test_an_app_whose_file_is_gone_saves_it_anew(
    start: Start, file: Path, taken: Callable[[Path], None], notices: str
) -> None:
    app = start(App)
    say(app, "an earlier chat")
    app("new")
    say(app, "one")
    prompts = ["an earlier chat", "one"]
    if notices == "reply":
        app("ask", "two")
    taken(file)
    outside = Counter(["from outside"] if taken in (without_locks, with_an_older_file) else [])
    if notices == "poll":
        assert app("poll")[1][:2] == ["one", "an earlier chat"] or taken in (without_locks, with_an_older_file)
    elif notices == "prompt":
        say(app, "two")
    elif notices == "reply":
        app("reply")
    if notices in ("prompt", "reply"):
        prompts.append("two")
    if notices == "end":
        app.end()
    else:
        assert app("hints") == [REPLACED]
        assert Counter(app("said")) == said(*prompts[1:])
        app.kill()  # nothing was left for a clean end
    assert kept(file) == said(*prompts) + outside


def test_an_app_that_was_left_a_stale_log_writes_nothing_of_it_back(start: Start, file: Path) -> None:
    """What was changed elsewhere since, in pages that the log has too, stays."""
    app = start(App)
    say(app, "one")
    without_locks(file)
    with Store.open(file) as store:
        store.rename(app("chat"), "named elsewhere")
    app.end()
    with Store.open(file) as store:
        assert {chat.title for chat in store.chats()} == {"named elsewhere", "from outside"}
    assert kept(file) == said("one") + Counter(["from outside"])


def test_only_sqlite_opens_the_file_in_an_app_and_in_a_command(start: Start, file: Path, tmp_path: Path) -> None:
    """When a descriptor of a file is closed, all locks of the process on it are gone."""
    app = start(Both)
    app("watch")
    say(app, "one")
    app("listed")
    told = {"CHAT": app("chat"), "FILE": str(exported(tmp_path, "two")), "ZIP": str(tmp_path / "b.zip")}
    commands = [*(f"chats {each}" for each in COMMANDS), "backup ZIP", "restore ZIP", "completion bash chats show ''"]
    for command in commands:
        app("run", *(told.get(word, word) for word in command.split()))
    app("poll")
    assert app("opened") == []
    say(app, "three")
    app.kill()
    assert kept(file) == said("one", "two", "three")
