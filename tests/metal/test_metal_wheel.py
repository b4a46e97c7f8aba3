"""A Mac whose MLX leaves its neural accelerators unused: what the commands and the chat say of it."""

from pathlib import Path

import pytest

from tests.cli.conftest import Run, tokamac  # noqa: F401
from tokamac.engine.perf import hardware


@pytest.fixture
def old_wheel(mac, metal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An M5 with the wheel for macOS 15, whose user was told nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mac.sysctl["machdep.cpu.brand_string"] = "Apple M5"
    metal.info["architecture"] = "applegpu_g17g"
    monkeypatch.setattr(hardware, "wheel_tags", lambda: ("py3-none-macosx_15_0_arm64",))


def test_inspect_says_it_each_time_and_ask_once(old_wheel, tokamac: Run):  # noqa: F811
    for _ in range(2):
        assert hardware.REINSTALL in tokamac("inspect", "guide").err
    first, second = (tokamac("ask", "--max-tokens", "1", "What is decode?") for _ in range(2))
    assert hardware.REINSTALL in first.err
    assert hardware.REINSTALL not in second.err


def test_a_chip_that_is_only_named_is_taken_to_have_them_and_that_is_said(tokamac: Run):  # noqa: F811
    assert "macOS 26.2 or later" in tokamac("inspect", "guide", "--chip", "M5", "--gpu-cores", "10").err
    assert "macOS 26.2" not in tokamac("inspect", "guide", "--chip", "M4", "--gpu-cores", "10").err
