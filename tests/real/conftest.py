"""The real models, where `make models` has put them, and an engine with one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.models import SMOLLM2
from tokamac.engine import Engine, PromptCacheSpec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("real")


@pytest.fixture(scope="session")
def hf() -> Path:
    """SmolLM2 as Hugging Face has it: bfloat16."""
    return _there(SMOLLM2.hf)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2, converted by default."""
    return _there(SMOLLM2.converted)


@pytest.fixture(scope="session")
def engine(smollm2: Path) -> Iterator[Engine]:
    """It, loaded once; prompts are kept in memory alone."""
    with Engine.load(smollm2, prompt_cache=PromptCacheSpec(disk=False)) as loaded:
        yield loaded


def _there(folder: Path) -> Path:
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: make models")
    return folder
