"""One engine for several programs: real processes over a real socket, by scripts and by a tiny model."""

import json
import os
import queue
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest

from tests.app.serve.serving import serving
from tests.scripted_engine import SCRIPTED
from tests.waiting import PATIENCE_S, until
from tokamac.app.backend.client import BackendEvent, Died, EngineLink, EngineProcess
from tokamac.app.backend.protocol import (
    AskCount,
    Cancel,
    Counted,
    EngineNotice,
    Generate,
    Load,
    Loaded,
    Loading,
    ReplyEvent,
    RequestFailed,
    Share,
)
from tokamac.app.backend.sharing import (
    CardFinder,
    ChatEngine,
    EngineCard,
    EngineGuest,
    SharingError,
    cards,
    connected,
    sharing_folder,
)
from tokamac.app.serve import engine as serve_engine
from tokamac.app.serve.model_pool import CardMaker
from tokamac.engine.events import Finished, Message
from tokamac.engine.options import KVSpec, Sampling

T = TypeVar("T")
HI = (Message("user", "Hi"),)
STEADY = Load("steady")


class Heard:
    """What an engine said."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[BackendEvent] = queue.SimpleQueue()

    def next(self, kind: type[T]) -> T:
        """Return the next of a kind; others are passed over."""
        while True:
            event = self.events.get(timeout=PATIENCE_S)
            if isinstance(event, kind):
                return event
            assert not isinstance(event, Died), event

    def end_of(self, reply: int) -> Finished:
        while True:
            event = self.next(ReplyEvent)
            assert event.id == reply
            if isinstance(event.event, Finished):
                return event.event


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own for sockets and cards; pytest's would be too long for a socket."""
    with TemporaryDirectory(prefix="t") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield sharing_folder()


@contextmanager
def owned(folder: Path, load: Load = STEADY) -> Iterator[tuple[EngineProcess, Heard, Path]]:
    """An engine's process with a model, and its socket."""
    heard, path = Heard(), folder / "own.sock"
    process = EngineProcess(SCRIPTED, folder / "log", heard.events.put)
    try:
        process.send(Share(str(path)))
        process.send(load)
        heard.next(Loaded)
        yield process, heard, path
    finally:
        process.kill()


def guest_of(path: Path, load: Load | None = STEADY) -> tuple[EngineGuest, Heard]:
    heard = Heard()
    guest = EngineGuest(path, heard.events.put, follows=load is None)
    guest.send(load or Load(""))
    return guest, heard


def test_owner_and_guests_write_at_once_and_hear_their_own_replies_alone(folder: Path) -> None:
    with owned(folder) as (process, heard, path):
        one, of_one = guest_of(path)
        two, of_two = guest_of(path, None)
        assert of_one.next(Loaded).info.name == of_two.next(Loaded).info.name
        for link in (process, one, two):  # the same id means another reply to each
            link.send(Generate(1, HI, Sampling(max_tokens=20)))
        texts = {each.end_of(1).text for each in (heard, of_one, of_two)}
        assert len(texts) == 1
        one.send(AskCount(1, "abcdefgh"))
        assert of_one.next(Counted).tokens == 2
        for link in (one, two):
            link.close()


def test_a_guest_cancels_its_own_reply_and_what_it_leaves_ends(folder: Path) -> None:
    with owned(folder) as (process, heard, path):
        guest, of_guest = guest_of(path)
        of_guest.next(Loaded)
        process.send(Generate(7, HI))
        guest.send(Generate(7, HI))
        guest.send(Generate(8, HI))
        of_guest.next(ReplyEvent)
        guest.send(Cancel(7))
        while (event := of_guest.next(ReplyEvent)).id != 7 or not isinstance(event.event, Finished):
            pass
        assert event.event.reason == "cancelled"
        guest.kill()  # reply 8 ends with it
        assert heard.end_of(7).reason == "stop"


def test_a_guest_can_not_take_the_model_away(folder: Path) -> None:
    with owned(folder) as (process, heard, path):
        guest, of_guest = guest_of(path)
        of_guest.next(Loaded)
        EngineLink.send(guest, Load("fast"))
        EngineLink.send(guest, Share(str(folder / "other.sock")))
        guest.send(Generate(1, HI, Sampling(max_tokens=5)))
        assert of_guest.end_of(1).text
        process.send(Generate(2, HI, Sampling(max_tokens=5)))
        assert heard.end_of(2).text
        assert not (folder / "other.sock").exists()
        guest.close()


def test_a_guest_that_expects_another_model_is_refused_and_one_that_lost_it_is_let_go(folder: Path) -> None:
    with owned(folder) as (process, heard, path):
        other, of_other = guest_of(path, Load("fast"))
        assert "this engine runs steady" in of_other.next(RequestFailed).error
        packed, of_packed = guest_of(path, replace(STEADY, kv=KVSpec(key_bits=8)))
        of_packed.next(RequestFailed)
        strict, of_strict = guest_of(path)
        server, of_server = guest_of(path, None)
        of_strict.next(Loaded)
        assert of_server.next(Loaded).info.name == "steady"
        process.send(Load("fast"))
        heard.next(Loaded)
        assert of_server.next(Loaded).info.name == "fast"  # who takes any hears of it
        assert "took another model" in of_strict_end(of_strict).why
        server.send(Generate(1, HI))
        assert of_server.end_of(1).reason == "stop"
        for link in (other, packed, strict, server):
            link.close()


def test_while_another_model_is_loaded_guests_hear_of_it_and_get_no_reply_of_it(folder: Path) -> None:
    with owned(folder) as (process, _, path):
        server, of_server = guest_of(path, None)
        first = of_server.next(Loaded).load
        process.send(Load("fast"))
        of_server.next(Loading)
        server.send(Generate(1, HI, load=first))  # what it was read for is not what is loaded next
        assert of_server.next(Loaded).load == first + 1
        refused = of_server.next(RequestFailed)
        assert (refused.id, refused.kind) == (1, "AnotherModelError")
        process.send(Load("missing"))
        of_server.next(Loading)
        assert of_server.next(RequestFailed).id is None
        server.close()


def of_strict_end(heard: Heard) -> Died:
    while not isinstance(event := heard.events.get(timeout=PATIENCE_S), Died):
        pass
    return event


def test_guests_hear_that_the_engine_died(folder: Path) -> None:
    with owned(folder) as (process, _, path):
        guest, heard = guest_of(path)
        heard.next(Loaded)
        guest.send(Generate(1, HI))
        heard.next(ReplyEvent)
        process.kill()
        assert of_strict_end(heard)
        assert not guest.alive


def test_a_guest_that_reads_nothing_holds_up_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owned(folder, Load("list")) as (process, heard, path):
        raw = connected(path)
        raw.sendall(b'{"type":"join"}\n' + b"".join(
            b'{"type":"generate","id":%d,"messages":[{"role":"user","content":"Hi"}]}\n' % id for id in range(40)
        ))  # fmt: skip
        process.send(Generate(1, HI))
        assert heard.end_of(1).reason == "stop"
        raw.close()


def test_foreign_bytes_are_answered_and_end_nothing(folder: Path) -> None:
    with owned(folder) as (process, heard, path):
        with connected(path) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b'{"type":"nonsense"}\n{"type":"generate","id":"x"}\n\xff\n')
            assert b"requestfailed" in raw.recv(1 << 16)
        process.send(Generate(1, HI, Sampling(max_tokens=3)))
        assert heard.end_of(1).text


# Cards.


def card_of(path: Path, load: Load = STEADY, pid: int = 1) -> EngineCard:
    return EngineCard(pid, "http://127.0.0.1:11435", load, str(path))


def cards_in(folder: Path) -> CardMaker:
    return lambda number, load: card_of(folder / f"serve-{number}.sock", load)


def test_cards_are_the_users_alone_and_stale_ones_go(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with owned(folder) as (_, _, path):
        card = card_of(path)
        card.write()
        assert stat.S_IMODE(card.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert list(cards()) == [card]
        assert CardFinder().find(STEADY) == card
        assert (
            CardFinder().find(replace(STEADY, memory=5, parallel=3, text_every_s=1.0)) == card
        )  # it computes the same
        assert CardFinder().find(Load("other")) is None
        assert CardFinder().find(replace(STEADY, kv=KVSpec(key_bits=8))) is None
    until(lambda: not list(cards()))
    assert not card.path.exists()


def test_sockets_that_were_left_without_a_card_go(folder: Path) -> None:
    with ExitStack() as opened:
        for name in ("left.sock", "young.sock", "heard.sock"):
            made = opened.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(str(folder / name))
            if name == "heard.sock":
                made.listen()
            changed_s = time.time() + 3600 if name == "young.sock" else 0.0  # on a slow machine it stays young
            os.utime(folder / name, (changed_s, changed_s))
        assert not list(cards())
        assert {each.name for each in folder.iterdir()} == {"young.sock", "heard.sock"}


def test_an_engine_that_was_started_again_is_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "LASTED_S", 3600.0)  # it is started by who asks
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with serving("dies-decoding", folder / "log", command=SCRIPTED, card=cards_in(folder)) as served:
        assert len(list(cards())) == 1
        assert served.ask("/v1/chat/completions", body)[0] == 503
        assert not list(cards())
        assert served.ask("/v1/chat/completions", body)[0] == 503
        until(lambda: served.health()["status"] == "ok")
        assert len(list(cards())) == 1
    assert not list(folder.glob("*.json"))


def test_a_model_that_can_not_be_loaded_leaves_no_socket(folder: Path) -> None:
    body = {"model": "missing", "messages": [{"role": "user", "content": "Hi"}]}
    with serving("fast", folder / "log", command=SCRIPTED, card=cards_in(folder), allowed=("missing",)) as served:
        assert served.ask("/v1/chat/completions", body)[0] == 400
        assert not [*folder.glob("*.sock"), *folder.glob("*.json")]  # fast had to leave for it


def test_a_card_that_is_no_card_is_passed_over(folder: Path, tmp_path: Path) -> None:
    (folder / "a.json").write_text("{")
    (folder / "b.json").write_text(json.dumps({"pid": 1}))
    (folder / "c.json").write_bytes(b"[" * 200_000)
    elsewhere = tmp_path / "elsewhere.sock"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(elsewhere))
        made.listen()
        (folder / "d.json").write_text(
            json.dumps({"pid": 1, "url": "", "load": {"model": "x"}, "socket": str(elsewhere)})
        )
        assert not list(cards())
    (folder / "e.sock").write_text("no socket")
    with pytest.raises(SharingError, match="not a socket of yours"):
        connected(folder / "e.sock")


def test_a_folder_that_others_could_enter_is_closed_or_refused(folder: Path, tmp_path: Path) -> None:
    folder.chmod(0o755)
    assert stat.S_IMODE(sharing_folder().stat().st_mode) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SharingError, match="is not yours"):
        sharing_folder()
    folder.unlink()


# The engine of a chat.


def test_a_chat_takes_the_engine_of_a_server_and_its_own_for_another_model(folder: Path) -> None:
    with owned(folder) as (_, _, path):
        card_of(path).write()
        heard = Heard()
        chat = ChatEngine(SCRIPTED, folder / "chat.log", heard.events.put, finder=CardFinder())
        chat.send(STEADY)
        assert "uses the engine of the server at http://127.0.0.1:11435" in heard.next(EngineNotice).text
        assert heard.next(Loaded).info.name == "steady"
        assert not (folder / "chat.log").exists()  # no process was started
        chat.send(Load("fast"))
        assert heard.next(Loaded).info.name == "fast"
        assert (folder / "chat.log").exists()
        chat.send(Generate(1, HI, Sampling(max_tokens=5)))
        assert heard.end_of(1).text
        chat.close()


def test_a_chat_whose_server_ends_hears_of_it_and_starts_its_own(folder: Path) -> None:
    with owned(folder) as (process, _, path):
        card_of(path).write()
        heard, finder = Heard(), CardFinder()
        chat = ChatEngine(SCRIPTED, folder / "chat.log", heard.events.put, finder=finder)
        chat.send(STEADY)
        heard.next(Loaded)
        process.kill()
        assert of_strict_end(heard)
        assert not chat.alive
        again = ChatEngine(SCRIPTED, folder / "chat.log", heard.events.put, finder=finder)
        again.send(STEADY)
        assert heard.next(Loaded).info.name == "steady"
        assert (folder / "chat.log").exists()
        again.close()


def test_a_path_that_is_too_long_for_a_socket_is_told(folder: Path) -> None:
    heard = Heard()
    process = EngineProcess(SCRIPTED, folder / "log", heard.events.put)
    process.send(Share(str(folder / ("x" * 120))))
    assert "too long for a socket" in heard.next(EngineNotice).text
    process.send(STEADY)
    heard.next(Loaded)
    process.kill()
