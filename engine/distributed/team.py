"""Rank 0's team: the hosts, their followers, the records sent to them, and the part of the model each has."""

import atexit
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ..device import end_without_mlx
from ..errors import DeviceError, ModelUnsupportedError, OptionError, TokamacError, access_hint
from ..files import expanded, read_text
from ..model.safetensors import Part
from ..options import MOST_NODES, NODE_BACKENDS, Backend, Nodes, Split

if TYPE_CHECKING:
    import mlx.core as mx

    from ..kv.plan import CachePlan

# Not ``mlx.launch`` itself: it keeps a core busy (MLX 0.32.4), forwards output ten times a second, and doesn't
# pass on a closed stdin. Processes get MLX's same variables.


LOOPBACK = "127.0.0.1"
FIRST_PORT = 32323  # where rank 0 listens, the next ones above it: the port of `mlx.launch`
FOLLOWER = "tokamac.engine.distributed.follower"
# Asks for no password, and ends within six seconds once the other machine is silent.
SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3",
)  # fmt: skip

_WRITE_ONE = "Let mlx.distributed_config write one (tokamac help nodes)."


@dataclass(frozen=True, slots=True)
class NodeHost:
    """A machine. ssh: name or loopback address. ips: listens there. rdma: device per peer.

    python: an interpreter with tokamac; None: this one's path.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[Any, ...] = ()
    python: str | None = None

    @property
    def is_here(self) -> bool:
        return self.ssh in (LOOPBACK, "localhost", "::1")


@dataclass(frozen=True, slots=True)
class NodeHosts:
    machines: tuple[NodeHost, ...]
    backend: Backend = "ring"
    env: Mapping[str, str] = field(default_factory=dict)

    def variables(self, rank: int) -> dict[str, str]:
        found = {**self.env, "MLX_RANK": str(rank)}
        if self.backend == "jaccl":
            found["MLX_JACCL_COORDINATOR"] = f"{self.machines[0].ips[0]}:{FIRST_PORT}"
        return found

    def files(self) -> dict[str, str]:
        if self.backend == "jaccl":
            return {"MLX_IBV_DEVICES": json.dumps([each.rdma for each in self.machines])}
        ports = free_ports(len(self.machines)) if all(each.is_here for each in self.machines) else None
        listens, port = list[list[str]](), FIRST_PORT
        for rank, each in enumerate(self.machines):
            listens.append([f"{ip}:{ports[rank] if ports else port + at}" for at, ip in enumerate(each.ips)])
            port += len(each.ips)
        return {"MLX_HOSTFILE": json.dumps(listens)}

    def command(self, rank: int) -> list[str]:
        host = self.machines[rank]
        if host.is_here:
            return [host.python or sys.executable, "-m", FOLLOWER]
        return [*SSH, "--", host.ssh, shlex.join(["exec", host.python or sys.executable, "-m", FOLLOWER])]


def hosts_of(nodes: Nodes) -> NodeHosts:
    """Return the machines of ``nodes``. Raises OptionError."""
    if nodes.hostfile is None:
        if nodes.backend == "jaccl":
            raise OptionError("jaccl needs the names of RDMA devices", f"Give a hostfile. {_WRITE_ONE}")
        return NodeHosts(tuple(NodeHost(LOOPBACK, (LOOPBACK,)) for _ in range(nodes.count or 0)))
    path = expanded(nodes.hostfile)
    try:
        found = _read(json.loads(read_text(path)), nodes.backend)
    except OSError as error:
        raise OptionError(
            f"the hostfile {path} can't be read: {error.strerror or error}", access_hint(error, _WRITE_ONE)
        ) from error
    except TokamacError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise OptionError(f"{path} is not a hostfile: {type(error).__name__}: {error}", _WRITE_ONE) from error
    return found


def _read(given: Any, backend: Backend | None) -> NodeHosts:
    top: Mapping[str, Any] = {"hosts": given} if isinstance(given, list) else given
    machines = tuple(_host(each) for each in top["hosts"])
    if not 2 <= len(machines) <= MOST_NODES:
        raise OptionError(f"the hostfile names {len(machines)} machines", f"Name 2 to {MOST_NODES}, this one first.")
    wanted = backend or top.get("backend") or "ring"
    if wanted not in NODE_BACKENDS:
        raise OptionError(
            f"the hostfile wants the backend {wanted!r:.40}", f"Use {' or '.join(NODE_BACKENDS)} (--backend)."
        )
    env = dict(_variable(each) for each in top.get("envs", []))
    for rank, each in enumerate(machines):
        if not each.ips and (wanted == "ring" or rank == 0):
            raise OptionError(f"the hostfile gives {each.ssh} no IP address", _WRITE_ONE)
        if wanted == "jaccl" and len(each.rdma) != len(machines):
            raise OptionError(f"the hostfile gives {each.ssh} no RDMA device for each machine", _WRITE_ONE)
    return NodeHosts(machines, wanted, env)


def _host(given: Mapping[str, Any]) -> NodeHost:
    ssh, ips, python = given["ssh"], given.get("ips", []), given.get("python")
    if not isinstance(ssh, str) or not ssh or ssh.startswith("-") or not ssh.isprintable():
        raise OptionError(f"{ssh!r:.60} is not the name of a machine", _WRITE_ONE)
    if not isinstance(ips, list) or not all(isinstance(ip, str) for ip in ips):
        raise OptionError(f"the hostfile's addresses of {ssh} are not a list of texts", _WRITE_ONE)
    if python is not None and not isinstance(python, str):
        raise OptionError(f"the hostfile's python of {ssh} is no path", _WRITE_ONE)
    return NodeHost(ssh, tuple(ips), tuple(given.get("rdma", [])), python)


def _variable(given: str) -> tuple[str, str]:
    name, mark, value = given.partition("=")
    if not mark or not name.replace("_", "").isalnum() or not name.isascii():
        raise OptionError(f"the hostfile's {given!r:.60} sets no variable", "Write NAME=VALUE.")
    return name, value


def free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


# A process joins MLX's group only once, so a team serves several models. Followers end when their stdin closes:
# none stays behind.


# Records between rank 0 and a follower: one JSON object a line, over the pipes of the follower's process.

Record = Mapping[str, Any]

LONGEST_LINE = 1 << 24  # bytes: the ids of a piece of a prompt are a small part of it


class Channel:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, record: Record) -> None:
        """Write a record; thread-safe. Raises OSError once nobody reads."""
        line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]


def records(stream: IO[bytes]) -> Iterator[Record]:
    while line := stream.readline(LONGEST_LINE):
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict):
            return
        yield record


BEAT_S = 1.0  # a follower says so often that it lives, whatever it computes
ROOM_TOKENS = 4096  # over so many, what a token takes is a mean: windows take no more
SILENCE_S = 8.0  # after which it counts as lost
# After which a step does, where all say that they live: later, so that a node that is silent is named.
LINK_SILENCE_S = 9.0
CONNECT_S = 60.0  # in which all have to start and to find each other
LEAVE_S = 2.0  # how long MLX gets to notice that the group is broken, before the process ends without it


T = TypeVar("T")

log = logging.getLogger(__name__)

AGAIN = "Check that machine and the link to it, then start again."


@dataclass(slots=True)
class Member:
    rank: int
    host: NodeHost
    process: "subprocess.Popen[bytes]"
    channel: Channel
    heard_s: float
    said: dict[str, Record] = field(default_factory=dict)
    last_line: str = ""

    def name(self, size: int) -> str:
        return f"node {self.rank + 1} of {size} ({self.host.ssh})"


class Team:
    """A group's processes, seen from rank 0.

    stuck_s: given a limit in seconds, how long the engine overran it, or None. when_lost: called with the reason,
    on any thread.
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
        """Return MLX's group once all joined; on the engine's thread. Raises DeviceError."""
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
        """Wait for loading on the engine's thread. Raises the reason if the group is lost."""
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
        """Send a record to every follower. Raises the reason if the group is lost."""
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
        self._loads += 1
        self.tell({"do": "load", "number": self._loads, **request})

    def await_loaded(self) -> list[Record]:
        """Return each follower's loaded model. Raises a follower's error."""
        return self.await_all(f"loaded {self._loads}", failed=f"failed {self._loads}")

    def allowed(self, held: int, token_bytes: int) -> int | None:
        with self._changed:
            said = [member.said.get("alive", {}) for member in self._members]
        return allowed_by([each for each in said if each.get("loaded") == self._loads], held, token_bytes)

    def unload(self) -> None:
        with suppress(TokamacError):
            self.tell({"do": "unload"})

    def await_all(self, what: str, within_s: float | None = None, *, failed: str = "failed") -> list[Record]:
        """Return and forget each follower's answer ``what``. Raises a follower's error."""
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
        return [member.process.pid for member in self._members]

    def fail(self, why: str) -> None:
        """Mark the group lost: this process didn't do what it sent, mostly since a node ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None, BEAT_S
            )  # its pipe says which, a moment after MLX's link
        self._lose(why)

    def close(self) -> None:
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
    from importlib import metadata

    return {name: metadata.version(name) for name in ("tokamac", "mlx", "mlx-lm")}


def token_bytes_of(plan: "CachePlan") -> int:
    return plan.bytes_at(ROOM_TOKENS) // ROOM_TOKENS


def allowed_by(others: Sequence[Record], held: int, token_bytes: int) -> int | None:
    """Return the bytes for rank 0's arrays, so that tokens fit on every node; None if no node says.

    others: their free bytes and bytes per token. held, token_bytes: rank 0's, which differ if layers divide unevenly.
    """
    rooms = [other["room"] * token_bytes // other["token_bytes"] for other in others if other.get("token_bytes")]
    return held + max(min(rooms), 0) if rooms else None


def check_same(mine: Record, theirs: Sequence[Record], hosts: NodeHosts) -> None:
    for rank, other in enumerate(theirs, 1):
        for name, value in mine.items():
            if other.get(name) != value:
                raise OptionError(
                    f"{hosts.machines[rank].ssh} has {name} {other.get(name)!r:.60}, and this machine {value!r:.60}",
                    "Have the same versions and the same model on all nodes.",
                )


_teams: list[Team] = []  # the one of this process, once it has one
_lock = threading.Lock()


def join(nodes: Nodes) -> Team:
    """Return this process's team, started if missing. Raises DeviceError, or OptionError for other nodes."""
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


# ``shard`` is observed on numbers that name their indices, so no class, packing or fusing needs special knowledge.


HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
# Numbers of a config that a rank has a part of, where layers are split.
WIDTHS = (*HEADS, "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True, slots=True)
class NodeShare:
    group: Any
    rank: int
    size: int
    split: Split

    def divide(self, module: Any, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Part]]:
        """Keep this rank's part of a lazy module; return its config, and divided parameters' parts.

        Raises ModelUnsupportedError where the class or shape doesn't allow it.
        """
        kind = str(config.get("model_type"))
        if self.split == "pipeline":
            return self._by_layers(module, config, kind), {}
        whole = _parameters(module)
        twin = deepcopy(module, {id(array): _hollow(array) for array in whole.values()})
        own = self._by_heads(module, config, kind)
        return own, self._parts(twin, _parameters(module))

    def connect(self, module: Any) -> None:
        if self.split == "pipeline" and (inner := _pipelined(module)) is not None:
            inner.pipeline_rank, inner.pipeline_size = self.rank, self.size

    @property
    def note(self) -> str:
        what = "a part of every layer" if self.split == "tensor" else "some of the layers"
        return f"{self.size} nodes hold the model, each {what}"

    def _by_heads(self, module: Any, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
        if not callable(getattr(module, "shard", None)):
            raise ModelUnsupportedError(
                f"mlx-lm's class for {kind} can't split its layers over several nodes",
                "Take another model" + (", or --split pipeline." if _pipelined(module) is not None else "."),
            )
        text = config.get("text_config", config)
        for name in HEADS:
            if (count := text.get(name)) is not None and count % self.size:
                raise ModelUnsupportedError(
                    f"{self.size} nodes can't divide its {count} {name.removeprefix('num_').replace('_', ' ')}",
                    "Use a number of nodes that divides it.",
                )
        try:
            module.shard(self.group)
        except (ValueError, AssertionError) as error:
            raise ModelUnsupportedError(
                f"its layers can't be split over {self.size} nodes: {' '.join(str(error).split())[:200]}",
                "Use another number of nodes.",
            ) from error
        return _changed(config, {name: text[name] // self.size for name in WIDTHS if text.get(name)})

    def _parts(self, twin: Any, own: "Mapping[str, mx.array]") -> dict[str, Part]:
        import mlx.core as mx
        import numpy as np
        from mlx.utils import tree_unflatten

        whole, axes = _parameters(twin), dict[str, int]()
        for name, array in whole.items():
            if name in own and own[name].ndim == array.ndim:
                differ = [axis for axis, size in enumerate(array.shape) if size != own[name].shape[axis]]
                if len(differ) == 1:
                    axes[name] = differ[0]
        most = max((whole[name].shape[axis] for name, axis in axes.items()), default=0)
        # Random, or what a class computes from one could be another.
        names = np.random.default_rng(0).choice(np.iinfo(np.int32).max, most, replace=False).astype(np.int32)
        index_of = {int(name): index for index, name in enumerate(names)}

        def named(array: mx.array, axis: int) -> mx.array:
            line = mx.array(names[: array.shape[axis]]).reshape([-1 if at == axis else 1 for at in range(array.ndim)])
            return mx.broadcast_to(line, array.shape)

        twin.update(tree_unflatten([(name, named(whole[name], axis)) for name, axis in axes.items()]))
        twin.shard(self.group)
        divided, parts = _parameters(twin), dict[str, Part]()
        del twin
        for name, axis in axes.items():
            array = divided.pop(name)  # one at a time, since each is computed
            line = array[tuple(slice(None) if at == axis else slice(1) for at in range(array.ndim))]
            if array.size and array.dtype == mx.int32 and mx.all(array == line).item():
                indices = [index_of.get(int(each), -1) for each in np.array(line).flat]
                if -1 not in indices:
                    parts[name] = Part.of_indices(axis, indices)
        return parts

    def _by_layers(self, module: Any, config: Mapping[str, Any], kind: str) -> dict[str, Any]:
        inner = _pipelined(module)
        if inner is None:
            raise ModelUnsupportedError(
                f"mlx-lm's class for {kind} can't give layers to several nodes",
                "Take another model" + (", or --split tensor." if callable(getattr(module, "shard", None)) else "."),
            )
        whole = len(module.layers)
        if whole < self.size:
            raise ModelUnsupportedError(f"{self.size} nodes can't divide its {whole} layers", "Use fewer nodes.")
        inner.pipeline(self.group)
        inner.pipeline_rank, inner.pipeline_size = 0, 1  # until ``connect``
        begin, end = inner.start_idx, inner.end_idx
        text = config.get("text_config", config)
        own = {
            name: value[begin:end] for name, value in text.items() if isinstance(value, list) and len(value) == whole
        }
        return _changed(config, {**own, "num_hidden_layers": len(module.layers)})


def _hollow(array: "mx.array") -> "mx.array":
    import mlx.core as mx

    return mx.broadcast_to(mx.zeros((), array.dtype), array.shape)


def _parameters(module: Any) -> "dict[str, mx.array]":
    from mlx.utils import tree_flatten

    return dict(tree_flatten(module.parameters()))


def _pipelined(module: Any) -> Any:
    from mlx_lm.models.pipeline import PipelineMixin

    found = [each for _, each in module.named_modules() if isinstance(each, PipelineMixin)]
    return found[0] if len(found) == 1 else None


def _changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    own = deepcopy(dict(config))
    text = own.get("text_config", own)
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    if heads and hidden and not text.get("head_dim"):
        text["head_dim"] = hidden // heads
    text.update(changes)
    return own
