"""A process that may take little address space (``ulimit -v``): one line says so, whatever it was that did not fit."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_tiny
from tokamac.engine.errors import MemoryLimitError
from tokamac.engine.perf import memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce a bound of address space")


def bounded(megabytes: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokamac.app.cli", *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (megabytes * 1000_000,) * 2),
    )


@linux
@pytest.mark.parametrize("command", [["ask", "hi", "-m"], ["inspect"], ["convert", "--dry-run"]], ids=lambda c: c[0])
def test_too_little_is_said_in_a_line(tmp_path: Path, command: list[str]) -> None:
    folder = make_tiny(tmp_path)
    done = bounded(150, *command, str(folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tokamac: this process may take \d+ MB more of address space, .*ulimit -v.*\n", done.stderr)


@linux
def test_what_it_may_take_bounds_the_memory_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10**15, 10**15))
    space = memory.space_left()
    assert space is not None
    assert 0 < space < 10**15
    with monkeypatch.context() as unbounded:
        unbounded.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
        assert memory.space_left() is None
    monkeypatch.setattr(memory, "space_left", lambda: 123 << 20)
    assert memory.system_limit() == memory.Limit(
        max((123 << 20) + memory.held(), memory.held() + memory.ALLOWANCE), "address space"
    )


def test_the_check_is_for_what_is_not_loaded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "space_left", lambda: 5_000_000)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    with pytest.raises(MemoryLimitError, match="5 MB more of address space"):
        memory.check_address_space()
    monkeypatch.setitem(sys.modules, "mlx.core", sys)
    memory.check_address_space()
