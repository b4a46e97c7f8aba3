"""Few open files allowed: the soft limit is raised as far as the hard one lets it, and a low hard one stops nothing that fits."""

import ctypes
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quant.quant_models import make_source
from tokamac.engine.files import WANTED, raise_open_files

CAP_SYS_RESOURCE = PR_CAPBSET_DROP = 24


def limited(soft: int, hard: int, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command that may have so many files open, and can't raise the hard limit even where it is root."""

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0)

    given = [sys.executable, *map(str, command)]
    return subprocess.run(given, preexec_fn=before, capture_output=True, text=True, check=False, timeout=200)


def tokamac(soft: int, hard: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    return limited(soft, hard, "-m", "tokamac.app.cli", *arguments)


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a hundred shards: a lazy load holds each of them open."""
    return make_source(tmp_path_factory.mktemp("many"), "llama", shards=100, num_hidden_layers=12)


def test_a_checkpoint_of_many_shards_is_converted_where_the_soft_limit_is_low(
    many_shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = tokamac(64, 4000, "convert", many_shards, "-o", out)
    assert done.returncode == 0, done.stderr
    assert (out / "config.json").is_file()


def test_a_hard_limit_that_is_too_low_for_the_shards_is_said(many_shards: Path, tmp_path: Path) -> None:
    done = tokamac(64, 64, "convert", many_shards, "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "this should not happen" not in done.stderr
    assert "64 files" in done.stderr
    assert "100 shards" in done.stderr
    assert "ulimit -n" in done.stderr


def test_everything_works_with_a_low_hard_limit(tmp_path: Path) -> None:
    """mlx-lm asks for 4,096 when it is imported, and would fail."""
    answered = tokamac(256, 512, "ask", "--json", "--max-tokens", 3, "Hello")
    assert json.loads(answered.stdout.splitlines()[-1])["event"] == "finished", answered.stderr
    assert tokamac(256, 512, "inspect", "guide").returncode == 0
    converted = tokamac(256, 512, "convert", "guide", "-o", tmp_path / "out", "--dequantize", "--no-verify")
    assert converted.returncode == 0, converted.stderr


def test_mlx_lm_lowers_no_limit() -> None:
    """Of (soft, hard) limits: what the process may have once mlx-lm is imported."""
    code = (
        "import resource; from tokamac.engine.files import import_mlx_lm\n"
        "before = resource.setrlimit; import_mlx_lm(); import mlx_lm\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit is before)"
    )
    assert limited(3000, 4000, "-c", code).stdout.split() == ["3000", "4000", "True"]
    assert limited(100, 4000, "-c", code).stdout.split() == ["2048", "4000", "True"]
    assert limited(100, 300, "-c", code).stdout.split() == ["300", "300", "True"]


def test_mlx_lm_leaves_a_high_hard_limit() -> None:
    code = (
        "import resource; from tokamac.engine.files import import_mlx_lm\n"
        "asked = []; resource.setrlimit = lambda which, limits: asked.append(limits)\n"
        "resource.getrlimit = lambda which: (256, 20000); import_mlx_lm(); print(asked)"
    )
    assert limited(256, 4000, "-c", code).stdout.strip() == "[(2048, 20000)]"


def test_the_chats_engine_raises_its_own_limit() -> None:
    code = (
        "import os, resource, sys; from tokamac.app.backend import child\n"
        "child.Child.run = lambda *_: os.write(2, str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]).encode())\n"
        "child.serve()"
    )
    assert limited(100, 4000, "-c", code).stderr == "4000"


def test_a_higher_limit_stays_and_one_that_cannot_be_raised_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def refused(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        raise ValueError("not allowed")

    monkeypatch.setattr(resource, "setrlimit", refused)
    for soft, hard in ((WANTED + 1, 2 * WANTED), (resource.RLIM_INFINITY, resource.RLIM_INFINITY), (256, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=(soft, hard): found)
        raise_open_files()
    assert asked == []
    for hard in (4096, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, found=(256, hard): found)
        raise_open_files()
    assert asked == [(4096, 4096), (WANTED, resource.RLIM_INFINITY)]
