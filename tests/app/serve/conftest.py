"""Servers that tests share: one with the guide, one whose engine plays scripts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.app.serve.serving import Served, serving
from tests.scripted_engine import SCRIPTED


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the embedded model."""
    with serving("guide", tmp_path_factory.mktemp("log") / "log") as served:
        yield served


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., AbstractContextManager[Served]]:
    """Starts a server whose engine plays a scenario."""
    return partial(serving, log=tmp_path / "log", command=SCRIPTED)
