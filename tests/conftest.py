"""Nothing a test does may touch the user's own folders, or the network."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from itertools import chain, count, groupby, zip_longest
from pathlib import Path

import hypothesis
import pytest

from tests.clients import clients
from tests.real import models

_MEMORY = Path("/dev/shm")  # where Linux has files in memory: tests write thousands, each through to the disk
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
_TEMPORARY = os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp")
for lying in (models, clients):  # by the user's own folders: tests only read there
    os.environ[lying.VARIABLE] = str(lying.folder())
# Before anything imports huggingface_hub or platformdirs: they read these once.
_HOME = tempfile.TemporaryDirectory(prefix="tokamac-tests-", dir=_TEMPORARY)
for variable, folder in {
    "HF_HOME": "hf",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "XDG_STATE_HOME": "state",
}.items():
    os.environ[variable] = str(Path(_HOME.name) / folder)
_RUNTIME = tempfile.TemporaryDirectory(prefix="t", dir=_TEMPORARY)  # short: the path of a Unix socket is bounded
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name
_COUNT = count()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes begin: what they import is compiled once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["MLX_ENABLE_TF32"] = (
    "0"  # MLX reads it once: equivalences and golden values are of float32, not of 10-bit mantissas
)
# Several tests run at once, and their threads would spin against each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("NO_COLOR", None)
# How long an example takes says nothing of what is tested, and on a busy machine it takes long.
_CHECKS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("each run", max_examples=30, **_CHECKS)
hypothesis.settings.register_profile("test-all", max_examples=100, **_CHECKS)
os.environ.pop("HF_TOKEN", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has what it starts in the background ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, and children inherit that it is ignored


LONGEST = (
    "tui/test_snapshots.py", "test_golden.py", "test_toys.py", "test_download.py", "test_metal.py", "tui/test_app.py",
    "test_evaluation.py", "tui/test_figures.py", "test_conversion.py", "test_usage.py", "tui/test_models.py",
    "plain/test_commands.py", "test_verify.py", "test_heads.py", "test_draft_model.py", "test_cpu_step.py", "test_resume.py",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """``make test-all`` leaves out no exhaustive tests, and tries more examples."""
    hypothesis.settings.load_profile("each run" if "not exhaustive" in config.option.markexpr else "test-all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin, so that none is left for the end; of the others, those that wait and those that compute by turns."""
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
    places = {longest: place for place, longest in enumerate(LONGEST)}

    def place(file: list[pytest.Item]) -> int:
        path = str(file[0].path)
        return next((places[longest] for longest in LONGEST if path.endswith(longest)), len(LONGEST))

    long = sorted((file for file in files if place(file) < len(LONGEST)), key=place)
    rest = [file for file in files if place(file) == len(LONGEST)]
    app = Path(__file__).parent / "app"
    waiting, computing = ([file for file in rest if (app in file[0].path.parents) is its] for its in (True, False))
    turns = (file for pair in zip_longest(waiting, computing, fillvalue=[]) for file in pair)
    items[:] = chain(*long, *turns)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: nothing is to be looked through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """All modules are imported: to look through them for garbage, at each full collection, was a good part of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # tests make many small objects, and few of them in cycles


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny unquantized model folder."""
    from tests.engine.helpers import write_model

    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def bandwidth_file() -> Path:
    """Where this machine's memory bandwidth is kept, timed once: a busy machine keeps none, and every load would time it."""
    from tokamac.engine.perf import bandwidth
    from tokamac.engine.perf.hardware import detect

    chip, size = detect(), bandwidth.SMALLEST
    if chip.bandwidth_gbs is None and (gbs := bandwidth.measure_bandwidth(size)) is not None:
        while size <= bandwidth.LARGEST:  # no working set is read faster than the smallest
            bandwidth.BandwidthRecord.measured(chip, size).keep(bandwidth.KeptBandwidth(2 * gbs, trusted=True))
            size *= 2
    return bandwidth.store_file()


@pytest.fixture(scope="module", autouse=True)
def _own_settings() -> Generator[None]:
    """What a chat chose in one file, its model above all, is not what another file's commands begin with."""
    yield
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


@pytest.fixture
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no standard input, as where a program is begun by a window."""
    monkeypatch.setattr(sys, "stdin", None)


@pytest.fixture
def settled_memory() -> None:
    """Arrays that other tests left in cycles are gone: MLX's counters are the whole process's."""
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()


@pytest.fixture
def all_worth_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is stored: whether reading is quicker than computing is measured, and a busy machine says otherwise at times."""
    from tokamac.engine.metrics import Rates

    monkeypatch.setattr(Rates, "is_worth", lambda *_: True)


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test stored must not be found by the next, nor an engine that it shares."""
    own = f"{_RUNTIME.name}/{next(_COUNT)}"
    Path(own).mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", own)
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", f"{own}/prompt cache")
    monkeypatch.setenv("TOKAMAC_DATA_DIR", f"{own}/data")
