"""Names that need no hub."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokamac.assets import asset_path
from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.hub import download


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert download.resolve(tmp_path) == tmp_path
    assert download.resolve(str(tmp_path)) == tmp_path


def test_guide_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guide").mkdir()  # a folder of that name needs ./
    assert download.resolve("./guide") == Path("guide")
    if asset_path("guide", "model").is_dir():
        assert download.resolve("guide") == asset_path("guide", "model")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nothing", "no folder"),
        ("/no/such/place", "no folder"),
        ("~/surely-not-here", "no folder"),
        ("a/b/c", "no model"),
        ("gpt2", "no model"),
        ("", "no model"),
        ("org/..", "no model"),
        ("org/name@../../etc", "no model"),
        ("org/na me", "no model"),
        ("https://huggingface.co/org/name", "no model"),
    ],
)
def test_names_that_can_be_nothing(name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        download.resolve(name)
    assert said in caught.value.message
    assert caught.value.hint


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        download.resolve(tmp_path / "model.gguf")


def test_importing_does_no_work() -> None:
    code = "import sys; import tokamac.engine.hub.download; assert not {'huggingface_hub', 'mlx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
