"""What files add to the system prompt: the memory of a profile and a project's file, told with their price."""

from pathlib import Path

import pytest

from tests.app.plain.plain_chat import piped
from tests.scripted_engine import model_spec
from tokamac.app import system_files
from tokamac.app.backend.protocol import AskPrice, Generate, Load, Loaded, MemoryUse, Priced, Warm
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.preferences import ChatOverrides, Preferences
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, Notice
from tokamac.app.settings import Settings
from tokamac.engine.events import Price
from tokamac.engine.options import Sampling


def session_with(preferences: Preferences) -> Session:
    session = Session(Load("m"), Sampling(), "Be brief.", lambda: 0.0)
    session.start()
    session.on_event(Loaded(model_spec("m"), MemoryUse()))
    preferences.hold(ChatOverrides(), session)
    session.system = "Be brief."
    return session


def test_the_system_prompt_ends_with_the_files_and_their_price_is_told_before_it_is_read(tmp_path: Path) -> None:
    preferences = Preferences(Settings(), tmp_path / "settings.toml")
    session = session_with(preferences)
    assert session.system_text == "Be brief."
    system_files.remember(tmp_path, "", "  I use  Linux. ")
    system_files.remember(tmp_path, "", "I like tea.")
    (tmp_path / "AGENTS.md").write_text("Run make test.")
    assert preferences.choose_project(str(system_files.project_file(tmp_path))) == ""
    preferences.give(session)
    session.system = "Be brief."
    whole = session.system_text
    assert whole.startswith("Be brief.\n\nAbout this project (AGENTS.md):\n\nRun make test.\n\n")
    assert whole.endswith("- I use Linux.\n- I like tea.")
    rows = session.context_use(Draft("hi")).rows
    assert [row.kind for row in rows] == ["system", "project", "memory", "draft"]
    (asked,) = session.tell_price("AGENTS.md is in")
    assert isinstance(asked, Ask)
    assert isinstance(asked.request, AskPrice)
    assert asked.request.messages[0].content == whole
    told, warms = session.on_event(Priced("quote", asked.request.id, Price(1300, 1204, 0, 3.0)))
    assert told == Notice("AGENTS.md is in: 1,204 tokens to read, about 3.0 s, once; then it is kept computed.")
    assert isinstance(warms, Ask)
    assert isinstance(warms.request, Warm)
    sent = [step.request for step in session.submit("hi") if isinstance(step, Ask)]
    assert isinstance(sent[0], Generate)
    assert sent[0].messages[0].content == whole
    assert preferences.for_new_chat.project == str(tmp_path / "AGENTS.md")


def test_a_file_that_is_gone_or_no_text_is_told_and_left_out(tmp_path: Path) -> None:
    preferences = Preferences(Settings(), tmp_path / "settings.toml")
    session = session_with(preferences)
    (tmp_path / "memory.md").write_bytes(b"\xff\xfe")
    told = preferences.hold(ChatOverrides(project=str(tmp_path / "gone.md")), session)
    assert "gone.md is empty or gone" in told
    assert "memory.md can't be read: it is not UTF-8 text" in told
    assert session.beside == ()
    with pytest.raises(system_files.SystemFileError, match=r"has no AGENTS\.md or README\.md"):
        system_files.project_file(tmp_path)
    assert system_files.memory_file(tmp_path, "../x").parent == tmp_path / "memory"  # no name leads elsewhere


def test_each_profile_has_its_memory_and_a_chat_keeps_its_project(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (tmp_path / "README.md").write_text("A project.")
    env = {"TEST_SETTINGS": str(config / "settings.toml")}
    lines = "/remember I use Linux.\n/profile save work\n/remember Ada is the lead.\n/project on\nhi\n/remember\n/show system\n"
    status, out, _ = piped(lines, "fast", env=env, cwd=tmp_path)
    assert status == 0
    assert (config / "memory.md").read_text() == "- I use Linux.\n"
    assert (config / "memory" / "work.md").read_text() == "- Ada is the lead.\n"
    assert "A project.\n\nWhat the user wants you to remember:\n\n- Ada is the lead." in out
    again = piped("/project\n/project off\n/show system\n", "fast", "-c", env=env)
    assert f"Part of the system prompt: {tmp_path / 'README.md'}" in again[1]
    assert "A project." not in again[1].partition("Part of the system prompt")[2].partition("\n")[2]
