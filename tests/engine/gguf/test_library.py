"""GGUF models of other programs: found by their manifests and folders, named, and never taken for another file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamac.engine.gguf.library import LM_STUDIO, MODEL_LAYER, OLLAMA, kept_models, ollama_file, owner_of
from tokamac.engine.gguf.places import projector_beside

DIGEST = "sha256:" + "a1" * 32


def manifest(root: Path, name: str, layers: Any) -> None:
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": layers}) if not isinstance(layers, str) else layers)


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    blob = tmp_path / "ollama" / "blobs" / DIGEST.replace(":", "-")
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF and more")
    return tmp_path / "ollama"


def test_ollamas_models_have_its_names_for_them(ollama: Path) -> None:
    model = [
        {"mediaType": "application/vnd.ollama.image.params", "digest": 3},
        {"mediaType": MODEL_LAYER, "digest": DIGEST},
    ]
    names = {
        "registry.ollama.ai/library/smollm2/135m": "smollm2:135m",
        "registry.ollama.ai/someone/own/latest": "someone/own:latest",
        "hf.co/org/Model-GGUF/Q4_K_M": "hf.co/org/Model-GGUF:Q4_K_M",
    }
    for name in names:
        manifest(ollama, name, model)
    found = kept_models((), ())
    assert {each.name for each in found} == {*names.values()}
    assert {(each.owner, each.nbytes) for each in found} == {(OLLAMA, 13)}
    assert ollama_file("smollm2:135m") == found[0].file == ollama / "blobs" / DIGEST.replace(":", "-")
    assert ollama_file("smollm2") is ollama_file("smollm2:1b") is None
    for name in ("smollm2:135m", str(found[0].file)):
        assert owner_of(name, found) in found


@pytest.mark.parametrize(
    "layers",
    [
        "no JSON", "[" * 100_000, "[1]", "{}", 7, [], [{}], [{"mediaType": MODEL_LAYER}],
        [{"mediaType": MODEL_LAYER, "digest": "sha256:../../../../etc/passwd"}],
        [{"mediaType": MODEL_LAYER, "digest": 7}],
        [{"mediaType": MODEL_LAYER, "digest": "sha256:" + "0" * 64}],
        [{"mediaType": MODEL_LAYER, "digest": DIGEST}, {"mediaType": MODEL_LAYER, "digest": DIGEST[:-1] + "2"}],
    ],
)  # fmt: skip
def test_a_manifest_that_names_no_model_is_passed_over(ollama: Path, layers: Any) -> None:
    manifest(ollama, "registry.ollama.ai/library/bad/1b", layers)
    assert kept_models((), ()) == ()


def test_a_folders_models_are_its_files_parts_together_and_no_projectors(tmp_path: Path, ollama: Path) -> None:
    sizes = {
        "a-Q4.gguf": 3,
        "b[1]-00001-of-00002.gguf": 4,
        "b[1]-00002-of-00002.gguf": 5,
        "mmproj-a.gguf": 6,
        "c.txt": 7,
    }
    for name, nbytes in sizes.items():
        (tmp_path / name).write_bytes(b"x" * nbytes)
    found = kept_models([tmp_path, tmp_path / "none"], [ollama])
    assert [(each.file.name, each.nbytes) for each in found] == [("a-Q4.gguf", 3), ("b[1]-00001-of-00002.gguf", 9)]
    assert {each.owner for each in found} == {LM_STUDIO}
    assert owner_of(str(tmp_path / "c.txt"), found) is None


def test_a_projector_lies_beside_a_file_or_beside_what_links_to_it(tmp_path: Path) -> None:
    blob, snapshot = tmp_path / "blobs" / "a1", tmp_path / "snapshots" / "main"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    (snapshot / "model.gguf").symlink_to(blob)
    assert projector_beside([blob]) is None
    (snapshot / "mmproj-model.gguf").write_bytes(b"GGUF")
    assert projector_beside([blob]) == projector_beside([snapshot / "model.gguf"]) == snapshot / "mmproj-model.gguf"
