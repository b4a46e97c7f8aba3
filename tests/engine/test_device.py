"""How many cores there are to compute with: by this process's affinity, and by what its control groups allow."""

import os
from pathlib import Path

import pytest

from tokamac.engine.device import usable_cores

MANY = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)), raising=False)


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write what Linux shows of control groups below ``root``."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, MANY),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, MANY),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),  # half a core is one thread
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "900000000 100000\n"}, MANY),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "300000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/not/seen/here\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            "5:cpuset:/\n4:cpu,cpuacct:/a\n0::/\n",
            {"sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        (
            "1:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            MANY,
        ),
        ("what is this\n0::/\n", {"sys/fs/cgroup/cpu.max": "no numbers\n"}, MANY),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "100000 0\n"}, MANY),
    ],
)
def test_as_many_as_the_control_groups_allow(tmp_path: Path, groups: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(machine(tmp_path, groups, files)) == cores


def test_where_there_are_no_control_groups_all_that_it_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == MANY
