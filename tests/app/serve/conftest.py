"""Servers that tests share: one with the guide, one whose engine plays scripts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.app.serve.serving import QUESTION, Served, serving
from tests.scripted_engine import SCRIPTED
from tokamac.engine import Engine, Finished, Sampling
from tokamac.engine.events import Message


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the embedded model."""
    with serving("guide", tmp_path_factory.mktemp("log") / "log") as served:
        yield served


@pytest.fixture(scope="session")
def alone() -> Finished:
    """What the engine itself answers."""
    with Engine.load("guide", prompt_cache=None) as engine:
        return engine.ask([Message("user", QUESTION)], Sampling(temperature=0, seed=1))


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., AbstractContextManager[Served]]:
    """Starts a server whose engine plays a scenario."""
    return partial(serving, log=tmp_path / "log", command=SCRIPTED)
