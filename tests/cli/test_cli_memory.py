"""``--memory`` and the setting ``memory_gb``: the limit that a person sets, in every command that loads a model or judges one."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokamac.app import settings
from tokamac.app.backend.child import _memory_use, load_engine
from tokamac.app.backend.protocol import Load
from tokamac.app.settings import Settings

LITTLE = ("--memory", "0.0001")
LOADING = (
    ("ask", "Hello", "--max-tokens", "1", "-m"),
    ("bench", "--prompt", "8", "--runs", "1", "--max-tokens", "1"),
    ("bench", "--kv-quality", "--depths", "8"),
    ("cache", "check"),
)


@pytest.mark.parametrize("command", LOADING, ids=lambda command: " ".join(command[:2]))
def test_a_flag_sets_the_limit(tokamac: Run, tiny: Path, command: tuple[str, ...]) -> None:
    done = tokamac(*command, tiny, *LITTLE)
    assert (done.status, done.out) == (1, "")
    assert "and 0.1 MB may be used" in done.err
    assert "--memory " in done.err  # the way on
    assert "Traceback" not in done.err


def test_a_setting_sets_it_and_a_flag_goes_before_that(tokamac: Run, tiny: Path) -> None:
    settings.save(settings.default_path(), Settings(memory_gb=0.0001))
    refused = tokamac(*LOADING[0], tiny)
    assert refused.status == 1
    assert "0.1 MB may be used" in refused.err
    assert tokamac(*LOADING[0], tiny, "--memory", "2").status == 0


@pytest.mark.parametrize("value", ["0", "-1", "nan", "much"])
def test_what_is_no_size_is_wrong_usage(tokamac: Run, tiny: Path, value: str) -> None:
    done = tokamac("ask", "Hello", "-m", tiny, "--memory", value)
    assert done.status == 2
    assert "--memory" in done.err


def test_a_cache_that_is_not_checked_takes_no_limit(tokamac: Run) -> None:
    done = tokamac("cache", "show", "--memory", "2")
    assert (done.status, done.out) == (2, "")
    assert "--memory" in done.err


def test_models_are_judged_by_it(tokamac: Run, tiny: Path) -> None:
    budget, fits = (
        json.loads(tokamac("inspect", tiny, "--memory", gb, "--json").out)["memory"][name]
        for gb, name in (("3", "budget"), ("0.0001", "fits"))
    )
    assert (budget, fits) == (3_000_000_000, False)
    settings.save(settings.default_path(), Settings(memory_gb=0.0001))
    assert "does not fit" in tokamac("inspect", tiny).out


def test_the_engines_process_gets_it_with_the_model(tiny: Path) -> None:
    engine, _ = load_engine(Load(str(tiny), prompt_cache=False, memory=3 * 10**9), lambda _: None)
    with engine:
        memory = _memory_use(engine)
        assert (memory.budget_bytes, memory.budget_source) == (3 * 10**9, "as set by --memory or the memory setting")
        assert memory.total_bytes
