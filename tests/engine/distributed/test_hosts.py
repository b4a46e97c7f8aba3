"""Which machines take part: what a hostfile may say, what each process is told, and what a case on several is worth."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tokamac.engine import Nodes, OptionError
from tokamac.engine.distributed.team import FIRST_PORT, FOLLOWER, LOOPBACK, hosts_of
from tokamac.engine.perf.inspection import LINKS, LinkSpec, NodesOutcome, inspect, model_ref, on_nodes
from tokamac.engine.perf.what_if import WhatIfCase, elsewhere

TWO: list[dict[str, Any]] = [
    {"ssh": "this.local", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en5"]},
    {"ssh": "other.local", "ips": ["10.0.0.2"], "rdma": ["rdma_en4", None]},
]


def hostfile(folder: Path, given: Any) -> str:
    path = folder / "hosts.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return str(path)


def test_processes_here_listen_on_loopback_and_are_started_without_ssh() -> None:
    hosts = hosts_of(Nodes(3))
    assert [host.ips for host in hosts.machines] == [(LOOPBACK,)] * 3
    assert hosts.command(2) == [sys.executable, "-m", FOLLOWER]
    assert hosts.variables(2)["MLX_RANK"] == "2"
    listens = json.loads(hosts.files()["MLX_HOSTFILE"])
    assert len({address for (address,) in listens}) == 3


def test_a_hostfile_of_mlx_is_read(tmp_path: Path) -> None:
    hosts = hosts_of(
        Nodes(hostfile=hostfile(tmp_path, {"backend": "jaccl", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": TWO}))
    )
    assert hosts.backend == "jaccl"
    told = {"MLX_METAL_FAST_SYNCH": "1", "MLX_RANK": "1", "MLX_JACCL_COORDINATOR": f"10.0.0.1:{FIRST_PORT}"}
    assert hosts.variables(1) == told
    assert json.loads(hosts.files()["MLX_IBV_DEVICES"]) == [each["rdma"] for each in TWO]
    command = hosts.command(1)
    assert command[0] == "ssh"
    assert command[-2] == "other.local"


def test_a_list_of_machines_speaks_by_ring_on_the_ports_of_mlx(tmp_path: Path) -> None:
    hosts = hosts_of(Nodes(hostfile=hostfile(tmp_path, TWO)))
    assert json.loads(hosts.files()["MLX_HOSTFILE"]) == [[f"10.0.0.1:{FIRST_PORT}"], [f"10.0.0.2:{FIRST_PORT + 1}"]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no JSON", "is not a hostfile"),
        ({"machines": []}, "is not a hostfile"),
        (TWO[:1], "names 1 machines"),
        ({"backend": "mpi", "hosts": TWO}, "the backend 'mpi'"),
        ([{"ssh": "-oProxyCommand=x", "ips": ["1"]}, TWO[1]], "is not the name of a machine"),
        ([{"ssh": "a"}, TWO[1]], "gives a no IP address"),
        ({"backend": "jaccl", "hosts": [{**TWO[0], "rdma": []}, TWO[1]]}, "no RDMA device for each"),
        ({"envs": ["A B=c"], "hosts": TWO}, "sets no variable"),
    ],
)
def test_what_no_hostfile_says_is_refused(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        hosts_of(Nodes(hostfile=hostfile(tmp_path, given)))


def test_nodes_that_are_none_are_refused(tmp_path: Path) -> None:
    for given in (
        {"count": 1},
        {"count": 2, "hostfile": "x"},
        {},
        {"count": 2, "split": "rows"},
        {"count": 2, "backend": "mpi"},
    ):
        with pytest.raises(OptionError):
            Nodes(**given)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="can't be read"):
        hosts_of(Nodes(hostfile=str(tmp_path / "none.json")))
    with pytest.raises(OptionError, match="RDMA"):
        hosts_of(Nodes(2, backend="jaccl"))


CASE = WhatIfCase(context=4096, prompt=4096)
PLACE = elsewhere("Apple M4 Max", 40, 64)


def outcome(nodes: int, split: Any, link: LinkSpec) -> NodesOutcome:
    return on_nodes(model_ref("Qwen3-8B-4bit"), CASE, PLACE, nodes, split=split, link=link)


def test_each_node_reads_less_and_holds_less_the_more_there_are() -> None:
    alone = inspect(model_ref("Qwen3-8B-4bit"), CASE, PLACE)
    two, four = (outcome(nodes, "tensor", LINKS["thunderbolt5"]) for nodes in (2, 4))
    assert alone.bytes_per_step > two.read_bytes > alone.bytes_per_step / 2  # the head is read by each
    assert two.read_bytes > four.read_bytes
    assert alone.memory.total > two.memory.total > four.memory.total


def test_a_token_takes_its_reading_and_its_messages() -> None:
    """36 layers, two sums each, and the token; 4,096 numbers of two bytes."""
    found = outcome(2, "tensor", LinkSpec("x", 8.0, 1e-3, ""))
    assert (found.messages, found.message_bytes) == (73, 8192)
    assert found.linking_s == pytest.approx(73 * (1e-3 + 8192 / 1e9))
    assert found.expected_tps == pytest.approx(1 / (found.reading_s + 73 * (1e-3 + 8192 / 1e9)))


def test_a_pipeline_is_never_faster_than_one_machine() -> None:
    alone = inspect(model_ref("Qwen3-8B-4bit"), CASE, PLACE)
    found = outcome(2, "pipeline", LinkSpec("x", 1e6, 1e-9, ""))
    assert alone.expected_tps is not None
    assert found.expected_tps == pytest.approx(alone.expected_tps, rel=1e-4)
    assert found.ceiling_tps == alone.ceiling_tps


def test_a_link_that_nobody_has_timed_makes_the_speed_unknown() -> None:
    found = outcome(2, "tensor", LINKS["ethernet"])
    assert found.expected_tps is None
    assert "--link-latency" in found.reason
    assert found.ceiling_tps is not None
