"""Nothing a test does may touch the user's own folders, or the network."""

import gc
import os
import signal
import tempfile
from collections.abc import Generator
from itertools import chain, groupby, zip_longest
from pathlib import Path

import hypothesis
import pytest

# Before anything imports huggingface_hub or platformdirs: they read these once.
_HOME = tempfile.TemporaryDirectory(prefix="tokamac-tests-")
for variable, folder in {
    "HF_HOME": "hf",
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "XDG_STATE_HOME": "state",
}.items():
    os.environ[variable] = str(Path(_HOME.name) / folder)
_RUNTIME = tempfile.TemporaryDirectory(prefix="t", dir="/tmp")  # short: the path of a Unix socket is bounded
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes begin: what they import is compiled once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["MLX_ENABLE_TF32"] = (
    "0"  # MLX reads it once: equivalences and golden values are of float32, not of 10-bit mantissas
)
os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # two tests run at once, and their threads would spin against each other
os.environ.pop("NO_COLOR", None)
# How long an example takes says nothing of what is tested, and on a busy machine it takes long.
hypothesis.settings.register_profile("tokamac", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tokamac")
os.environ.pop("HF_TOKEN", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has what it starts in the background ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it, and children inherit that it is ignored


LONGEST = (
    "tui/test_snapshots.py", "test_golden.py", "test_download.py", "test_metal.py", "tui/test_app.py", "test_evaluation.py",
    "tui/test_figures.py", "test_conversion.py", "test_usage.py", "tui/test_models.py", "plain/test_commands.py",
)  # fmt: skip


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
            bandwidth.BandwidthRecord.of(chip, size).keep(bandwidth.KeptBandwidth(2 * gbs, trusted=True))
            size *= 2
    return bandwidth.store_file()


@pytest.fixture
def settled_memory() -> None:
    """Arrays that other tests left in cycles are gone: MLX's counters are the whole process's."""
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()


@pytest.fixture
def all_worth_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is stored: whether reading is quicker than computing is measured, and a busy machine says otherwise at times."""
    from tokamac.engine.prompt_cache.disk import Rates

    monkeypatch.setattr(Rates, "is_worth", lambda *_: True)


@pytest.fixture(autouse=True)
def own_prompt_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test stored must not be found by the next, nor an engine that it shares."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", tempfile.mkdtemp(dir=_RUNTIME.name))
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path / "prompt cache"))
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
