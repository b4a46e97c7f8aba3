"""Rank 0's end of the followers: starts them, tells them what to do, and notices when one is gone or silent.

A process joins MLX's group once, so a team lives as long as its process and serves one model after another. Followers end when
their stdin does: however this process goes, none stays behind.
"""

import atexit
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

from ..device import end_without_mlx
from ..errors import DeviceError, OptionError, TokamacError
from ..options import Nodes
from .channel import Channel, Record, records
from .hosts import NodeHost, NodeHosts, hosts_of

BEAT_S = 1.0
"""A follower says so often that it lives, whatever it computes."""
ROOM_TOKENS = 4096
"""Over so many, what a token takes is a mean: windows take no more."""
SILENCE_S = 8.0
"""After which it counts as lost."""
LINK_SILENCE_S = 9.0
"""After which a step does, where all say that they live: later, so that a node that is silent is named."""
CONNECT_S = 60.0
"""In which all have to start and to find each other."""
LEAVE_S = 2.0
"""How long MLX gets to notice that the group is broken, before the process ends without it."""

if TYPE_CHECKING:
    from ..kv.plan import CachePlan

T = TypeVar("T")

log = logging.getLogger(__name__)

AGAIN = "Check that machine and the link to it, then start again."


@dataclass(slots=True)
class Member:
    """A follower. said: what it said last of each kind. last_line: of its log."""

    rank: int
    host: NodeHost
    process: "subprocess.Popen[bytes]"
    channel: Channel
    heard_s: float
    said: dict[str, Record] = field(default_factory=dict)
    last_line: str = ""

    def name(self, size: int) -> str:
        """Return what a person calls it."""
        return f"node {self.rank + 1} of {size} ({self.host.ssh})"


class Team:
    """All processes of a group, seen from rank 0.

    connected: whether MLX has a group. stuck_s: how long the engine has been at a step that takes far too long; it is given the
    seconds that any may take, and None is not. when_lost: called, by any thread, with the reason, when the group can't go on.
    """

    def __init__(self, nodes: Nodes, hosts: NodeHosts, clock: Callable[[], float] = time.monotonic) -> None:
        self.nodes, self.hosts = nodes, hosts
        self.size = len(hosts.machines)
        self.error: TokamacError | None = None
        self.when_lost: list[Callable[[TokamacError], None]] = []
        self.stuck_s: Callable[[float], float | None] = lambda _: None
        self._clock = clock
        self._changed = threading.Condition()
        self.connected = self._closed = False
        self._loads = 0
        self._files = hosts.files()
        self._members = list[Member]()
        try:
            for rank in range(1, self.size):
                self._members.append(self._started(rank))
        except OSError as error:
            self.close()
            raise DeviceError(f"a node can't be started: {error}", "Check that ssh is installed.") from error
        for member in self._members:
            for run in (self._listen, self._log):
                threading.Thread(target=run, args=(member,), name=f"node-{member.rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="nodes-watch", daemon=True).start()
        atexit.register(self.close)

    def _started(self, rank: int) -> Member:
        process = subprocess.Popen(
            self.hosts.command(rank),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for this process
        )
        assert process.stdin is not None
        member = Member(rank, self.hosts.machines[rank], process, Channel(process.stdin.fileno()), self._clock())
        with suppress(OSError):  # it is dead already, which is noticed elsewhere
            member.channel.send({"do": "begin", "env": self.hosts.variables(rank), "files": self._files})
        return member

    def connect(self) -> Any:
        """Return MLX's group, once all have joined it. Called on the engine's thread. Raises DeviceError."""
        self.await_all("begun", CONNECT_S)
        os.environ.update(self.hosts.variables(0))
        self.tell({"do": "connect", "backend": self.hosts.backend})
        late = threading.Timer(CONNECT_S, self._lose, [f"the nodes found no way to each other in {CONNECT_S:g} s"])
        late.daemon = True
        late.start()
        try:
            group = join_group(self.hosts.backend, self._files)
        except (RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise DeviceError(
                f"the nodes can't be connected by {self.hosts.backend} ({said})",
                "tokamac help nodes says what it needs.",
            ) from error
        finally:
            late.cancel()
        self.connected = True
        return group

    def guarding(self, loading: "Future[T]") -> T:
        """Wait for what loads on the engine's thread, and no longer than the group lives. Raises the reason."""
        while True:
            try:
                return loading.result(BEAT_S)
            except TimeoutError:
                if loading.done():
                    return loading.result()
                if self.error is not None:
                    atexit.register(end_without_mlx)  # its thread may wait for a node for ever
                    raise self.error from None

    def tell(self, record: Record) -> None:
        """Have every follower do what a record says. Raises the reason where the group can't go on."""
        if self.error is not None:
            raise self.error
        try:
            for member in self._members:
                member.channel.send(record)
        except OSError as error:
            if not self._closed:
                self._lose(f"{member.name(self.size)} is gone")
            raise (self.error or DeviceError("the nodes are closed")) from error

    def load(self, request: Record) -> None:
        """Have every follower load a model; ``await_loaded`` tells when they have."""
        self._loads += 1
        self.tell({"do": "load", "number": self._loads, **request})

    def await_loaded(self) -> list[Record]:
        """Return what each follower says of the model that it loaded. Raises what one of them failed with."""
        return self.await_all(f"loaded {self._loads}", failed=f"failed {self._loads}")

    def allowed(self, held: int, token_bytes: int) -> int | None:
        """Return the bytes that arrays of this process may take as the others' memory allows; see ``allowed_by``."""
        with self._changed:
            said = [member.said.get("alive", {}) for member in self._members]
        return allowed_by([each for each in said if each.get("loaded") == self._loads], held, token_bytes)

    def unload(self) -> None:
        """Have every follower let go of its model."""
        with suppress(TokamacError):
            self.tell({"do": "unload"})

    def await_all(self, what: str, within_s: float | None = None, *, failed: str = "failed") -> list[Record]:
        """Return what each follower says of ``what``, and forget it. Raises what one of them failed with."""
        until = None if within_s is None else self._clock() + within_s
        with self._changed:
            while self.error is None and not all(what in each.said or failed in each.said for each in self._members):
                if not self._changed.wait(None if until is None else until - self._clock()) and until is not None:
                    break
            if self.error is not None:
                raise self.error
            for member in self._members:
                if (failure := member.said.pop(failed, None)) is not None:
                    raise _failure(failure, member.name(self.size))
                if what not in member.said:
                    raise DeviceError(f"{member.name(self.size)} does not answer", AGAIN)
            return [member.said[what] if what == "begun" else member.said.pop(what) for member in self._members]

    @property
    def pids(self) -> list[int]:
        """The processes that this one started."""
        return [member.process.pid for member in self._members]

    def fail(self, why: str) -> None:
        """The group can't go on: this process did not do what it told the others, mostly since one of them ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None, BEAT_S
            )  # its pipe says which, a moment after MLX's link
        self._lose(why)

    def close(self) -> None:
        """End the followers. Safe to call again."""
        self._closed = True
        atexit.unregister(self.close)
        for member in self._members:
            with suppress(OSError, ValueError):
                member.channel.send({"do": "leave"})
                assert member.process.stdin is not None
                member.process.stdin.close()
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(LEAVE_S)
            _kill(member)

    def _listen(self, member: Member) -> None:
        assert member.process.stdout is not None
        for record in records(member.process.stdout):
            member.heard_s = self._clock()
            if (what := record.get("said")) is not None:
                with self._changed:
                    member.said[str(what)] = record
                    self._changed.notify_all()
                if what == "failed" and record.get("fatal"):
                    self._lose(
                        f"{member.name(self.size)} failed: {record.get('error', '')}", str(record.get("hint", ""))
                    )
        if not self._closed:
            said = f": {member.last_line}" if member.last_line and "begun" not in member.said else ""
            self._lose(f"{member.name(self.size)} ended ({_ended(member.process.wait())}{said})")

    def _log(self, member: Member) -> None:
        assert member.process.stderr is not None
        for line in member.process.stderr:
            if text := line.decode(errors="replace").strip():
                member.last_line = text[:200]
                log.info("%s: %s", member.host.ssh, text)

    def _watch(self) -> None:
        last = self._clock()
        while not self._closed and self.error is None:
            time.sleep(BEAT_S / 2)
            with suppress(OSError):
                for member in self._members:
                    member.channel.send({"do": "beat"})
            now, before = self._clock(), last
            last = now
            # A link that is gone ends no process: all wait for it in a collective, and say that they live.
            if now - before < SILENCE_S / 2 and (taken := self.stuck_s(LINK_SILENCE_S)) is not None:
                self._lose(f"nothing has come from the other nodes for {taken:.0f} s: a link between them stalls")
            for member in self._members:
                if now - before > SILENCE_S / 2:  # this process itself was stopped: what they said waits to be read
                    member.heard_s = max(member.heard_s, now - SILENCE_S / 2)
                if "begun" in member.said and now - member.heard_s > SILENCE_S and not self._closed:
                    self._lose(f"{member.name(self.size)} has not answered for {SILENCE_S:g} s")

    def _lose(self, why: str, hint: str = "") -> None:
        with self._changed:
            if self.error is not None or self._closed:
                return
            self.error = DeviceError(f"{why}, so the model can't go on", hint or AGAIN)
            self._changed.notify_all()
        for member in self._members:
            _kill(member)
        for act in self.when_lost:
            act(self.error)


def _kill(member: Member) -> None:
    """End a follower, and what it started."""
    if member.process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(member.process.pid, signal.SIGKILL)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _failure(record: Record, who: str) -> TokamacError:
    return DeviceError(f"{who}: {record.get('error', '')}", str(record.get("hint", "")))


def join_group(backend: str, files: Mapping[str, str]) -> Any:
    """Return MLX's group of this process, whose rank the environment says. files: that MLX reads, by variable."""
    import mlx.core as mx

    kept = list[Path]()
    for name, content in files.items():
        with NamedTemporaryFile("w", prefix="tokamac-nodes-", delete=False) as file:
            file.write(content)
        kept.append(Path(file.name))
        os.environ[name] = file.name
    try:
        return mx.distributed.init(strict=True, backend=backend)
    finally:
        for path in kept:
            path.unlink(missing_ok=True)


def versions() -> Mapping[str, str]:
    """Return what must be the same on all nodes."""
    from importlib import metadata

    return {name: metadata.version(name) for name in ("tokamac", "mlx", "mlx-lm")}


def token_bytes_of(plan: "CachePlan") -> int:
    """Return what a token takes of this process's memory in a long context."""
    return plan.bytes_at(ROOM_TOKENS) // ROOM_TOKENS


def allowed_by(others: Sequence[Record], held: int, token_bytes: int) -> int | None:
    """Return the bytes that arrays of rank 0 may take, so that what tokens take on the others fits there; None where none says.

    others: what each said last, of its room beside the model and of a token. held, token_bytes: what the model takes on rank 0, and
    a token of its keys and values, which differs where layers are not divided evenly.
    """
    rooms = [other["room"] * token_bytes // other["token_bytes"] for other in others if other.get("token_bytes")]
    return held + max(min(rooms), 0) if rooms else None


def check_same(mine: Record, theirs: Sequence[Record], hosts: NodeHosts) -> None:
    """Raise OptionError where a node has another model, or other versions."""
    for rank, other in enumerate(theirs, 1):
        for name, value in mine.items():
            if other.get(name) != value:
                raise OptionError(
                    f"{hosts.machines[rank].ssh} has {name} {other.get(name)!r:.60}, and this machine {value!r:.60}",
                    "Have the same versions and the same model on all nodes.",
                )


_teams: list[Team] = []
"""The one of this process, once it has one."""
_lock = threading.Lock()


def join(nodes: Nodes) -> Team:
    """Return the team of this process, started where there is none. Raises DeviceError, or OptionError where it is another one."""
    with _lock:
        if _teams and _teams[0].error is not None and not _teams[0].connected:
            _teams.clear()  # MLX knows of no group yet
        if not _teams:
            _teams.append(Team(nodes, hosts_of(nodes)))
        team = _teams[0]
    if team.error is not None:
        raise team.error
    if (team.nodes.count, team.nodes.hostfile, team.nodes.backend) != (nodes.count, nodes.hostfile, nodes.backend):
        raise OptionError("this process has joined other nodes already", "Start another one.")
    return team
