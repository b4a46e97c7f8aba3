"""The lines between the packages: app → engine ← quant, and what may import what."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("app", "engine", "quant", "assets")
MAY_IMPORT = {
    "app": {"app", "engine", "quant", "assets"},
    "engine": {"engine", "assets"},
    "quant": {"quant", "engine", "assets"},
    "assets": {"assets"},
}
MOST_FILES = 22
LARGEST_BINARY_BYTES = 1_000_000  # outside assets: wheels, weights and recordings are fetched or made, not kept
# What the files of mlx-lm's form call their parts.
SHARED_NAMES = {"Attention", "FeedForward", "Mixture", "Model", "ModelArgs", "Router"}
SCREEN_FREE = ("app/chat", "app/tui", "app/plain", "app/cli.py", "app/options.py", "app/text", "app/settings")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def named(node: ast.AST, file: Path) -> set[str]:
    """What an import statement of ``file`` names, in full: modules, and what is taken from them."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    parts = ("tokamac", *file.relative_to(ROOT).parent.parts)
    base = parts[: len(parts) - node.level + 1] if node.level else ()
    module = ".".join((*base, *([node.module] if node.module else [])))
    return {module} | {f"{module}.{alias.name}" for alias in node.names}


@cache
def imports(file: Path) -> set[str]:
    return {name for node in ast.walk(tree_of(file)) for name in named(node, file)}


def test_relative_imports_are_told_in_full() -> None:
    (node,) = ast.parse("from ..kv.cache import Cache").body
    assert named(node, ROOT / "engine/perf/memory.py") == {"tokamac.engine.kv.cache", "tokamac.engine.kv.cache.Cache"}
    (node,) = ast.parse("from . import memory").body
    assert named(node, ROOT / "engine/perf/__init__.py") == {"tokamac.engine.perf", "tokamac.engine.perf.memory"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_are_relative_inside_a_package_and_absolute_across(package: str) -> None:
    for file in sources(package):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom):
                inside = f"tokamac.{package}" in {".".join(name.split(".")[:2]) for name in named(node, file)}
                assert inside == (node.level > 0), f"{file.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_downwards(package: str) -> None:
    for file in sources(package):
        ours = {name.split(".")[1] for name in imports(file) if name.startswith("tokamac.")}
        assert ours <= MAY_IMPORT[package], f"{file.relative_to(ROOT)} imports {sorted(ours - MAY_IMPORT[package])}"


def test_homes_are_looked_up_in_one_place() -> None:
    """``Path.expanduser`` raises RuntimeError for a home that nobody has, which no caller thinks of: ``files.expanded`` doesn't."""
    users = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in sources(package)
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and node.attr == "expanduser"
    }
    assert users == {"engine/files.py"}


def test_quant_is_used_by_the_commands_about_conversion_alone() -> None:
    users = {
        str(file.relative_to(ROOT))
        for file in sources("app")
        if any(n.startswith("tokamac.quant") for n in imports(file))
    }
    about = ("app/commands/convert", "app/commands/inspect", "app/commands/quality", "app/reports/verdict.py")
    assert all(user.startswith(about) for user in users), users


@pytest.mark.parametrize("package", ["engine", "quant"])
def test_libraries_neither_print_nor_parse_nor_draw(package: str) -> None:
    for file in sources(package):
        used = {name.split(".")[0] for name in imports(file)}
        assert not used & {"textual", "rich", "argparse", "click"}, file
        calls = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), file


def test_the_chat_knows_no_view() -> None:
    """``tui`` and ``plain`` are views of ``chat``: it draws nothing, and imports neither of them."""
    for file in sources("app/chat"):
        used = imports(file)
        assert not {name.split(".")[0] for name in used} & {"textual", "rich"}, file
        assert not [name for name in used if name.startswith(("tokamac.app.tui", "tokamac.app.plain"))], file


def test_the_plain_chat_draws_nothing() -> None:
    for file in sources("app/plain"):
        used = imports(file)
        assert not {name.split(".")[0] for name in used} & {"textual", "rich"}, file
        assert not [name for name in used if name.startswith("tokamac.app.tui")], file


def test_the_screen_never_touches_mlx() -> None:
    for file in sources("app"):
        name = str(file.relative_to(ROOT))
        if name.startswith(SCREEN_FREE):
            heavy = {module for module in imports(file) if module.split(".")[0] in {"mlx", "mlx_lm", "transformers"}}
            assert not heavy, f"{name} imports {heavy}"
            assert "tokamac.engine.engine" not in imports(file), name


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("tokamac", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_at_runtime(file: Path) -> set[str]:
    """What a file imports, at its top or inside a function; not what only a type checker reads."""
    tree = tree_of(file)
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return {name for node in ast.walk(tree) if id(node) not in typed for name in named(node, file)}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a ring; none where there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        found = next((ring for ring in map(visit, sorted(graph[module])) if ring), [])
        path.pop()
        done.add(module)
        return found

    return next((ring for ring in map(visit, graph) if ring), [])


def test_no_import_goes_round_in_a_circle() -> None:
    files = {module_of(file): file for package in PACKAGES for file in sources(package)}
    graph = {}
    for module, file in files.items():
        names = imported_at_runtime(file)
        # ``from package import module`` names the package too: what is meant is the module.
        meant = {name for name in names if name in files} - {module}
        whole = {name for name in meant if any(other.startswith(name + ".") for other in names)}
        graph[module] = meant - {name for name in whole if files[name].name == "__init__.py"}
    assert circle(graph) == []


def test_a_circle_would_be_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_shows_its_subject_at_a_glance(package: str) -> None:
    for folder in {file.parent for file in sources(package)}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder


def test_a_name_is_one_class() -> None:
    seen: dict[str, list[str]] = {}
    for file in (file for package in PACKAGES for file in sources(package)):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                seen.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name for name, files in seen.items() if len(files) > 1} == SHARED_NAMES


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_engine_does_no_work() -> None:
    modules = run_python("import sys, tokamac.engine; print(*sys.modules)").split()
    assert not {"mlx.core", "mlx_lm", "transformers", "numpy"} & set(modules)


def test_after_a_product_of_numpys_no_thread_of_its_blas_spins() -> None:
    spun_s = run_python(
        "import time, tokamac.engine, numpy as np; a = np.ones((64, 512), np.float32); b = np.ones((512, 512), np.float32)\n"
        "a @ b; began = time.process_time(); time.sleep(0.2); print(time.process_time() - began)"
    )
    assert float(spun_s) < 0.01  # of the processor, not of the clock; 0.1 without what the engine sets


def test_nothing_generic_is_installed_at_the_top_level() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert all(package.startswith("tokamac.") for package in settings["packages"])


def test_every_package_folder_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("__init__.py")}
    assert set(settings["packages"]) == {"tokamac." + ".".join(folder.parts) for folder in folders}


def test_no_large_binary_is_in_the_repository_but_assets() -> None:
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached"]
    tracked = subprocess.run(git, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a clone: nothing says which files are tracked")
    files = [ROOT / name for name in tracked.stdout.split("\0") if name and not name.startswith("assets/")]
    large = [file for file in files if file.is_file() and file.stat().st_size > LARGEST_BINARY_BYTES]
    assert [file.name for file in large if b"\0" in file.read_bytes()] == []
