"""The documents say what is true: links lead somewhere, every figure has a script behind it."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.test_guide_product import FLAG, options_of
from tokamac.app.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "BENCHMARKS.md",
    "assets/guide/MODEL_CARD.md",
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files(name: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", read(name))
    missing = [target for target in targets if "://" not in target and not ((ROOT / name).parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_document_names_a_folder_of_the_machine_it_was_made_on(name: str) -> None:
    assert re.findall(r"(?<![\w.~])/(?:root|home|work|tmp|Users)/\S+", read(name)) == []


def test_every_flag_the_readme_names_exists() -> None:
    flags = {flag for name in COMMANDS for flag in options_of(import_module(f"tokamac.app.commands.{name}").parser())}
    assert set(FLAG.findall(read("README.md"))) <= flags | {"--help", "--version", "--json"}


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    named = {target for name in DOCUMENTS for target in re.findall(r"(?:^|`)make ([a-z]+)", read(name), re.MULTILINE)}
    assert named
    assert named <= targets


def test_pictures_are_real_and_free_of_scripts() -> None:
    pictures = sorted((ROOT / "assets" / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        text = picture.read_text(encoding="utf-8").lower()
        assert "<script" not in text
        assert "url(" not in text.replace("url(#", ""), "looking at a picture must not fetch anything"
