"""Prompts that are files: what their front matter sets, what it refuses, and how they are sent."""

from pathlib import Path

import pytest

from tests.app.commands.conftest import Run
from tests.app.plain.plain_chat import last_path, piped
from tokamac.app import prompt_files
from tokamac.app.store.store import Store
from tokamac.engine.options import Sampling, TemplateOptions


def made(folder: Path, text: str, name: str = "review") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    return folder


def test_front_matter_sets_what_it_names_and_words_go_where_the_text_says(tmp_path: Path) -> None:
    front = "description: Review\ntemperature: 0.2\nthinking: off\n# a comment\ntools: [read_file, list_files]\nstop: ['a', b]\n"
    folder = made(tmp_path, f"---\n{front}schema: x.json\nmodel: org/name\n---\nRead $ARGUMENTS well.\n")
    (folder / "x.json").write_text('{"type": "string"}')
    prompt = prompt_files.read(folder, "review")
    assert (prompt.about, prompt.profile.model, prompt.profile.tools) == (
        "Review",
        "org/name",
        ("read_file", "list_files"),
    )
    sampling = prompt_files.over(prompt, Sampling(top_k=7))
    assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.2, 7, ("'a'", "b"))
    assert sampling.json_schema == '{"type": "string"}'
    assert prompt_files.over(prompt, TemplateOptions()).thinking == "off"
    assert prompt.filled("the tests") == "Read the tests well."
    made(tmp_path, "Plain.", "plain")
    assert prompt_files.read(folder, "plain").filled(" x ") == "Plain.\n\nx"
    assert prompt_files.names(folder) == ["plain", "review"]


@pytest.mark.parametrize(
    ("front", "line", "why"),
    [
        ("temprature: 0.2", 2, "did you mean temperature"), ("\nwindow: 4096", 3, "a prompt has no 'window'"),
        ("temperature: hot", 2, "temperature"), ("temperature: 99", 2, "temperature"),
        ("top_k: 1\ntop_k: 2", 3, "given twice"), ("just words", 2, "is no setting"),
        ("schema: none.json", 2, "can't be read"), ("schema: [1]", 2, "can't be read"),
        ("description: [1]", 2, "not a text"), ("model: \x1b[31m7", 2, "model"),
    ],
)  # fmt: skip
def test_bad_front_matter_is_one_line_that_names_the_file(tmp_path: Path, front: str, line: int, why: str) -> None:
    folder = made(tmp_path, f"---\n{front}\n---\nText")
    if "\x1b" in front:  # a model's name is whatever it is: it is shown safely, where it is shown
        assert prompt_files.read(folder, "review").profile.model == "\x1b[31m7"
        return
    with pytest.raises(prompt_files.PromptFileError) as caught:
        prompt_files.read(folder, "review")
    assert f"review.md line {line}: " in caught.value.one_line()
    assert why in caught.value.one_line()
    assert caught.value.one_line().isprintable()


@pytest.mark.parametrize("name", ["", "../x", "A", "a b", "x" * 41])
def test_no_other_file_is_read_or_written(tmp_path: Path, name: str) -> None:
    for work in (lambda: prompt_files.read(tmp_path, name), lambda: prompt_files.write(tmp_path, name, "x")):
        with pytest.raises(prompt_files.PromptFileError, match="no name of a prompt"):
            work()


def test_a_file_is_a_command_with_its_settings_and_the_chats_own_commands_win(data: Path, tmp_path: Path) -> None:
    env = {"TEST_SETTINGS": str(tmp_path / "settings.toml")}
    made(tmp_path / "prompts", "---\ntemperature: 0.25\n---\nReview this: $ARGUMENTS")
    made(tmp_path / "prompts", "Never sent.", "stats")
    made(tmp_path / "prompts", "---\nnothing\n---\n", "broken")
    lines = "/review a diff\n/stats\n/stats\n/broken\nhi\n/prompts save kept\n/prompts\n/kept again\n"
    status, out, err = piped(lines, "fast", env=env)
    assert status == 0
    path = last_path(data)
    assert [m.text for m in path if m.role == "user"] == ["Review this: a diff", "hi", "hi\n\nagain"]
    with Store.open(data) as store:
        temperatures = [store.message(m.id).settings["sampling"]["temperature"] for m in path if m.role == "assistant"]
    assert temperatures == [0.25, None, None]
    assert err.count("/stats is the chat's own command, not your prompt stats.md") == 1
    assert "broken.md line 2: nothing is no setting" in err
    assert "/kept: hi" in out
    assert "hidden by the chat's own command /stats" in out


def test_ask_sends_one_with_its_settings_under_the_flags(tokamac: Run, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "XDG_CONFIG_HOME" / "tokamac" / "prompts"
    folder.mkdir(parents=True)
    made(folder, f"---\nmodel: {tiny}\nmax_tokens: 3\ntemperature: 0\n---\nHello $ARGUMENTS")
    asked = tokamac("ask", "--prompt", "review", "you", "--json")
    assert '"generated_tokens": 3' in asked.out
    same = tokamac("ask", "Hello you", "-m", tiny, "--max-tokens", "5", "--temp", "0")
    assert tokamac("ask", "--prompt", "review", "you", "--max-tokens", "5").out == same.out != ""
    refused = tokamac("ask", "--prompt", "reviews", "you")
    assert (refused.status, refused.err.count("\n")) == (1, 1)
    assert "Did you mean review?" in refused.err
