"""Control groups of both versions, in folders like the kernel's."""

from pathlib import Path

import pytest

from tokamac.engine.perf import memory
from tokamac.engine.perf.memory import Group, bounding

GB = 10**9


def machine(root: Path, groups: str, *mounts: str) -> Path:
    """Write what ``/proc/self`` says: its groups, and where hierarchies are mounted below ``root``."""
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text("".join(f"{mount}\n" for mount in ("23 1 0:21 / / rw - ext4 /dev/sda rw", *mounts)))
    return proc


def v2(folder: Path, limit: int | str, used: int, **stat: int) -> None:
    """Write a group's files as version 2 has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in stat.items()))


def unified(at: Path, root: str = "/") -> str:
    return f"35 23 0:32 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/\n", unified(tmp_path))
    # 12 GB of a download that was just read, as a container's files had them, and some that can't be dropped.
    v2(
        tmp_path,
        16 * GB,
        15 * GB,
        anon=2 * GB,
        file=12_500_000_000,
        shmem=5 * GB // 10,
        inactive_file=9 * GB,
        active_file=3 * GB,
        slab_reclaimable=1 * GB,
    )
    assert bounding(proc) == [Group(16 * GB, 2 * GB)]


def test_every_slice_above_bounds_as_well(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/user.slice/user-1000.slice/app.scope\n", unified(tmp_path))
    v2(tmp_path / "user.slice/user-1000.slice/app.scope", "max", 1 * GB)
    v2(tmp_path / "user.slice/user-1000.slice", 6 * GB, 5 * GB, inactive_file=2 * GB)
    v2(tmp_path / "user.slice", 8 * GB, 5 * GB)
    assert bounding(proc) == [Group(6 * GB, 3 * GB), Group(8 * GB, 5 * GB)]


def test_a_container_that_sees_its_own_part_alone(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/docker/abc\n", unified(tmp_path, "/docker/abc"))
    v2(tmp_path, 4 * GB, 1 * GB)
    assert bounding(proc) == [Group(4 * GB, 1 * GB)]


def test_a_group_outside_of_what_is_seen_is_bound_by_what_is_mounted(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/../other\n", unified(tmp_path))
    v2(tmp_path, 4 * GB, 1 * GB)
    assert bounding(proc) == [Group(4 * GB, 1 * GB)]


def test_version_1_counts_the_groups_below_and_writes_no_limit_as_a_large_one(tmp_path: Path) -> None:
    folder = tmp_path / "a b/service"
    mount = f"35 31 0:32 / {tmp_path}/a\\040b rw - cgroup cgroup rw,memory"
    other = f"32 31 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu"
    proc = machine(tmp_path, "9:name=systemd:/\n4:memory:/service\n1:cpu:/\n0::/\n", other, mount)
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("2000000000\n")
    (folder / "memory.usage_in_bytes").write_text("1500000000\n")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 900000000\ntotal_active_file 100000000\n"
    (folder / "memory.stat").write_text(stat)
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder.parent / "memory.usage_in_bytes").write_text("4936708096\n")
    assert bounding(proc) == [Group(2 * GB, GB // 2)]


@pytest.mark.parametrize("groups", ["", "nonsense\n", "0::/gone\n"])
def test_where_there_are_none_nothing_bounds(tmp_path: Path, groups: str) -> None:
    assert bounding(machine(tmp_path, groups, unified(tmp_path), "broken line")) == []
    assert bounding(tmp_path / "no proc") == []


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of 24 GB without a GPU, 20 GB of it available and no swap, where this process holds 1 GB of arrays."""
    monkeypatch.setattr("mlx.core.device_info", lambda: {"architecture": "x86_64"})
    monkeypatch.setattr(memory, "held", lambda: GB)
    monkeypatch.setattr(memory, "process_rss", lambda: 3 * GB)
    monkeypatch.setattr(memory, "_physical", lambda: 24 * GB)
    monkeypatch.setattr(memory, "_meminfo", lambda: memory.MemInfo(20 * GB, 0))
    monkeypatch.setattr(memory, "bounding", list)
    return monkeypatch


def test_the_limit_on_linux_is_what_others_can_not_give_way_for(linux: pytest.MonkeyPatch) -> None:
    assert memory.system_limit() == memory.Limit(21 * GB, "machine")
    assert memory.available() == 21 * GB
    linux.setattr(memory, "_meminfo", lambda: memory.MemInfo(20 * GB, 2 * GB))
    assert memory.system_limit() == memory.Limit(
        23 * GB, "machine"
    )  # swap takes idle programs, as macOS compresses them
    assert memory.available() == 21 * GB
    assert memory.taken_from_others(22 * GB, memory.available()) == GB
    linux.setattr(memory, "_meminfo", lambda: memory.MemInfo(20 * GB, 90 * GB))
    assert memory.system_limit() == memory.Limit(24 * GB, "machine")


def test_a_container_bounds_by_what_its_programs_hold(linux: pytest.MonkeyPatch) -> None:
    linux.setattr(memory, "bounding", lambda: [Group(16 * GB, 2 * GB), Group(18 * GB, 5 * GB)])
    assert memory.system_limit() == memory.Limit(14 * GB, "container")
    assert memory.machine_total() == 16 * GB


def test_on_linux_too_nothing_that_is_allocated_is_above_the_limit(linux: pytest.MonkeyPatch) -> None:
    linux.setattr(memory, "_meminfo", lambda: memory.MemInfo(0, 0))
    linux.setattr(memory, "held", lambda: 6 * GB)
    linux.setattr(memory, "process_rss", lambda: 5 * GB)
    assert memory.system_limit() == memory.Limit(6 * GB + memory.ALLOWANCE, "machine")
