"""A private chat: nothing of it is on the disk, and no socket leaves the machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.app.plain.plain_chat import Terminal, children, piped
from tests.scripted_engine import model_spec
from tests.waiting import until
from tokamac.app.backend.protocol import Load, Loaded, MemoryUse, RequestFailed
from tokamac.app.chat.session import Session
from tokamac.app.commands.doctor import connections
from tokamac.app.store.store import Store
from tokamac.engine.options import Sampling

SECRET = "xylophone"
ASKED = """
import sys
from tokamac.app import cli
from tokamac.app.commands.doctor import connections
with connections() as hosts:
    status = cli.main(sys.argv[1:])
print("hosts:", hosts, file=sys.stderr)
sys.exit(status)
"""


def files_with(folder: Path, word: str) -> list[str]:
    found = (file for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    return [str(file) for file in found if word.encode() in file.read_bytes()]


def test_nothing_of_a_private_chat_is_kept(data: Path, tmp_path: Path) -> None:
    env = {"TEST_SETTINGS": str(tmp_path / "settings.toml"), "TOKAMAC_CACHE_DIR": str(tmp_path / "cache")}
    lines = f"kept\n/private\n{SECRET}\n/title {SECRET}\n/chats\n/again\n/private\nkept too\n/chats\n"
    status, out, err = piped(lines, "fast", env=env)
    assert status == 0
    assert "Private chat: nothing is kept" in err
    assert err.count("This chat is private: nothing of it is kept. /private ends and forgets it.") == 2
    assert "The private chat is forgotten." in err
    with Store.open(data) as store:
        assert [chat.title for chat in store.chats()] == ["kept too", "kept"]
        assert store.history(9) == ["kept too", "kept"]
    assert "1. kept too" in out
    quits = piped(f"{SECRET} again\n", "fast", "--private", env=env)
    assert quits[0] == 0
    assert "To continue:" not in quits[1]
    assert files_with(tmp_path, SECRET) == []


def test_the_lines_of_a_private_chat_are_not_recalled(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = terminal("fast", "--plain", "--private")
    chat.until("private> ")
    chat.type(f"{SECRET}\n")
    chat.until("private> ")
    chat.type("/private\n")
    chat.until("is forgotten")
    chat.until("you> ")
    seen = len(chat.shown)
    chat.type("\x1b[A\n/quit\n")  # up: the line before
    assert chat.left() == 0
    assert SECRET.encode() not in chat.shown[seen:]


def test_it_has_an_engine_process_of_its_own(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")
    chat.until("you> ")
    seen = []
    for line, prompt in (("hi", "you> "), ("/private", "private> "), ("hi", "private> "), ("/private", "you> ")):
        chat.type(f"{line}\n")
        chat.until(prompt)
        until(lambda: len(children(chat.process.pid)) == 1)
        seen.append(children(chat.process.pid)[0])
    assert seen[1] == seen[2]
    assert len(set(seen)) == 3


def test_an_engine_that_falls_back_stays_private() -> None:
    session = Session(Load("a"), Sampling(), "", lambda: 0.0)
    session.start()
    session.on_event(Loaded(model_spec("a"), MemoryUse()))
    session.choose(Load("b", private=True))
    session.on_event(RequestFailed(None, "no", "more"))
    assert session.engine.load == Load("a", private=True)
    assert not Load("a").same_engine(session.engine.load)  # nor is a server's engine shared


def test_an_answer_opens_no_socket_but_to_this_machine(tiny: Path) -> None:
    command = [sys.executable, "-c", ASKED, "ask", "Hello", "-m", str(tiny), "--max-tokens", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "hosts: []"
    with connections() as hosts:
        for address in (("127.0.0.1", 1), ("::1", 1, 0, 0), "/tmp/socket", ("192.0.2.1", 80)):
            sys.audit("socket.connect", None, address)
        for host in ("localhost", None, "example.org"):
            sys.audit("socket.getaddrinfo", host, 443, 0, 0, 0)
    sys.audit("socket.connect", None, ("192.0.2.2", 80))
    assert hosts == ["192.0.2.1", "example.org"]
