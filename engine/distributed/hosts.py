"""Which machines take part, and how a process is started on each. Reads the hostfile of ``mlx.launch``.

``mlx.launch`` itself is not used: it keeps a core busy while nothing happens (MLX 0.32.4: its threads ask in turn whether they may
write), hands output over ten times a second, and does not close stdin of its processes when its own is closed. What a process is
told is the same: MLX's own variables, from the same file.
"""

import json
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError, TokamacError, access_hint
from ..files import expanded, read_text
from ..options import MOST_NODES, NODE_BACKENDS, Backend, Nodes

LOOPBACK = "127.0.0.1"
FIRST_PORT = 32323
"""Where rank 0 listens, the next ones above it: the port of ``mlx.launch``."""
FOLLOWER = "tokamac.engine.distributed.follower"
SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3",
)  # fmt: skip
"""Asks for no password, and ends within six seconds once the other machine is silent."""

_WRITE_ONE = "Let mlx.distributed_config write one (tokamac help nodes)."


@dataclass(frozen=True, slots=True)
class NodeHost:
    """A machine. ssh: its name for ssh, or a loopback address. ips: where it listens. rdma: its device towards each machine.

    python: the interpreter there that has tokamac; None is this one's path.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[Any, ...] = ()
    python: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether a process there is one of this machine."""
        return self.ssh in (LOOPBACK, "localhost", "::1")


@dataclass(frozen=True, slots=True)
class NodeHosts:
    """All machines, rank by rank: the first is this one. env: what each process has in its environment."""

    machines: tuple[NodeHost, ...]
    backend: Backend = "ring"
    env: Mapping[str, str] = field(default_factory=dict)

    def variables(self, rank: int) -> dict[str, str]:
        """Return what the process of a rank has in its environment."""
        found = {**self.env, "MLX_RANK": str(rank)}
        if self.backend == "jaccl":
            found["MLX_JACCL_COORDINATOR"] = f"{self.machines[0].ips[0]}:{FIRST_PORT}"
        return found

    def files(self) -> dict[str, str]:
        """Return what files each process has, by the variable that names them to MLX."""
        if self.backend == "jaccl":
            return {"MLX_IBV_DEVICES": json.dumps([each.rdma for each in self.machines])}
        ports = free_ports(len(self.machines)) if all(each.is_here for each in self.machines) else None
        listens, port = list[list[str]](), FIRST_PORT
        for rank, each in enumerate(self.machines):
            listens.append([f"{ip}:{ports[rank] if ports else port + at}" for at, ip in enumerate(each.ips)])
            port += len(each.ips)
        return {"MLX_HOSTFILE": json.dumps(listens)}

    def command(self, rank: int) -> list[str]:
        """Return what starts the process of a rank other than this one's."""
        host = self.machines[rank]
        if host.is_here:
            return [host.python or sys.executable, "-m", FOLLOWER]
        return [*SSH, "--", host.ssh, shlex.join(["exec", host.python or sys.executable, "-m", FOLLOWER])]


def hosts_of(nodes: Nodes) -> NodeHosts:
    """Return the machines that ``nodes`` names. Raises OptionError."""
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
    """Return what a hostfile says, in the form of ``mlx._distributed_utils.common.Hostfile``."""
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
    """Return ports of the loopback address that nothing listens to."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
