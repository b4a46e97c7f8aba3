from collections.abc import Iterator
from pathlib import Path

import pytest

from tokamac.app.store.store import Store


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data" / "chats" / "chats.db"


@pytest.fixture
def store(file: Path) -> Iterator[Store]:
    with Store.open(file) as opened:
        yield opened
