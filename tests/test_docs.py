"""The documents say what is true: links lead somewhere, every figure has a script behind it."""

import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from tests.test_guide_product import FLAG, options_of
from tokamac.app import help as texts
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


def test_every_file_that_a_document_of_the_code_names_exists() -> None:
    pattern = r"`((?:app|engine|quant|assets|tests)/[\w./]+)`"
    named = {path for name in ("ARCHITECTURE.md", "CONTRIBUTING.md") for path in re.findall(pattern, read(name))}
    assert len(named) > 30
    assert {path for path in named if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_document_names_a_folder_of_the_machine_it_was_made_on(name: str) -> None:
    assert re.findall(r"(?<![\w.~])/(?:root|home|work|tmp|Users)/\S+", read(name)) == []


def test_every_flag_the_readme_names_exists() -> None:
    flags = {flag for name in COMMANDS for flag in options_of(import_module(f"tokamac.app.commands.{name}").parser())}
    assert set(FLAG.findall(read("README.md"))) <= flags | {"--help", "--version", "--json"}


def test_every_topic_a_document_names_exists() -> None:
    topics = {topic for name in DOCUMENTS for topic in re.findall(r"tokamac help ([a-z]+)", read(name))}
    assert "kv" in topics
    assert topics <= texts.topics().keys()


@pytest.mark.parametrize("code", [
    re.findall(r"```python\n(.*?)```", read("README.md"), re.DOTALL)[0],
    textwrap.dedent("".join(re.findall(r"^(?:  .*)?\n", texts.topic("python").partition("Stop")[0], re.MULTILINE))),
])  # fmt: skip
def test_the_python_of_the_documents_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code, {})
    *answer, rate = capsys.readouterr().out.splitlines()
    assert "decode" in " ".join(answer).lower()
    assert re.fullmatch(r" [\d.]+ tok/s", rate)


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
