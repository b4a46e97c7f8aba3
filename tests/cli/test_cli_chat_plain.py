"""``tokamac chat`` without a screen, through pipes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.plain_chat import OBEYED, PATIENCE_S, last_path, piped, spawn
from tests.tiny import make_tiny
from tokamac.app.chat.actions import ACTIONS
from tokamac.app.plain.commands import COMMANDS
from tokamac.app.plain.processes import MODEL_FIRST
from tokamac.app.store.store import UNDO_S, Store
from tokamac.app.store.values import StoredMessage

pytestmark = pytest.mark.usefixtures("data")


def test_each_line_is_answered_on_stdout_and_kept(data: Path) -> None:
    status, out, err = piped("one\ntwo\n", "fast")
    assert (status, err) == (0, "")
    assert out.count("every weight once per token") == 2
    assert [message.text for message in last_path(data) if message.role == "user"] == ["one", "two"]
    assert all(message.state == "complete" for message in last_path(data))


def test_what_was_deleted_long_ago_is_removed_at_the_end(data: Path) -> None:
    with Store.open(data, clock=lambda: time.time() - UNDO_S - 60) as store:
        old = store.new_chat().id
        store.delete(old)
        kept = store.new_chat().id
    assert piped("", "fast") == (0, "", "")
    with Store.open(data) as store:
        assert store.known(old) is None
        assert store.known(kept) is not None


def test_lines_belong_together_after_a_backslash_and_in_a_block(data: Path) -> None:
    piped('a\\\nb\n"""\nc\n\n/quit\n"""\nd\\', "fast")
    assert [m.text for m in last_path(data) if m.role == "user"] == ["a\nb", "c\n\n/quit", "d"]


def test_nothing_that_a_terminal_obeys_reaches_stdout_or_stderr() -> None:
    _, out, err = piped("hi\x1b[2J\n/chats\n/title x\x1b]0;y\x07z\n/chats\n/open 1\n/nosuch\x1b[2J\n", "hostile")
    assert "before" in out
    assert "after" in out
    assert not OBEYED.search(out)
    assert not OBEYED.search(err)
    assert "echo" not in out  # the payload of a sequence goes with it
    assert "[bold]not markup[/]" in out


def test_no_input_is_no_error() -> None:
    assert piped("", "fast") == (0, "", "")
    assert piped("", "fast", stdin=subprocess.DEVNULL)[0] == 0


def test_a_reader_that_leaves_ends_it_and_what_was_said_is_kept(data: Path) -> None:
    process = spawn("steady")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("hi\n")
    process.stdin.flush()
    process.stdout.read(4)
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 141
    assert process.stderr.read() == ""
    process.stdin.close()
    process.stderr.close()
    asked, reply = last_path(data)
    assert (asked.text, reply.state) == ("hi", "stopped")
    assert reply.text.startswith("Deco")


def test_a_killed_chat_is_gone_on_with(data: Path) -> None:
    process = spawn("slow")
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hi\n")
        process.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        while not (data.exists() and _reply_of(data)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    status, _, _ = piped("and then?\n", "--continue", "fast")
    assert status == 0
    first, partial, second, whole = last_path(data)
    assert (first.text, partial.state, second.text, whole.state) == ("hi", "stopped", "and then?", "complete")
    assert partial.text.startswith("Deco")


def _reply_of(data: Path) -> str:
    with Store.open(data) as store:
        chat = store.latest()
        return "" if chat is None else "".join(m.text for m in store.path(chat.id) if m.role == "assistant")


def test_ctrl_c_in_a_pipe_stops_the_reply_and_leaves(data: Path) -> None:
    process = spawn("steady")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("one\ntwo\n")
    process.stdin.flush()
    process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    assert out.endswith("\n")
    assert [(m.text, m.state) for m in last_path(data) if m.role == "user"] == [("one", "complete")]
    assert last_path(data)[1].state == "stopped"


@pytest.mark.parametrize("scenario", ["missing", "dies-sending", "tiny-context"])
def test_what_fails_is_said_and_the_status_is_1(scenario: str) -> None:
    status, out, err = piped("what is the reason for this?\n", scenario)
    assert (status, out.strip()) == (1, "")
    assert err.strip()


def test_a_chat_that_is_not_there_is_one_line_and_status_1() -> None:
    for name in ("zzzzzzzz", "no id", ""):
        status, out, err = piped("hi\n", "fast", "--chat", name)
        assert (status, out, err.count("\n")) == (1, "", 1)


def test_a_deleted_chat_is_not_gone_on_with(data: Path) -> None:
    piped("hi\n", "fast")
    with Store.open(data) as store:
        chat = store.chats()[0].id
        store.delete(chat)
    status, out, err = piped("hi\n", "fast", "--chat", chat)
    assert (status, out) == (1, "")
    assert "was deleted" in err


def test_a_chat_is_opened_by_the_beginning_of_its_id_or_its_place_in_the_list(data: Path) -> None:
    piped("about apples\n/new\nabout pears\n", "fast")
    with Store.open(data) as store:
        pears, apples = (chat.id for chat in store.chats())
    piped("and plums\n", "fast", "--chat", apples[:6])
    piped("/chats pears\n/open 1\nand figs\n", "fast")
    with Store.open(data) as store:
        assert [m.text for m in store.path(apples) if m.role == "user"] == ["about apples", "and plums"]
        assert [m.text for m in store.path(pears) if m.role == "user"] == ["about pears", "and figs"]


def test_continue_and_chat_exclude_each_other() -> None:
    assert piped("", "--continue", "--chat", "abc")[0] == 2


def test_without_a_store_it_goes_on_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "file"))
    status, out, err = piped("hi\n/chats\n/title x\n", "fast")
    assert status == 0
    assert "every weight" in out
    assert "Chats are not saved" in err


def test_versions_forks_and_titles_are_as_in_the_full_chat(data: Path) -> None:
    _, out, _ = piped("one\n/again\n/older\n/edit uno\n/older\n/fork\n/title Copy\nmore\n", "fast")
    assert "you: one\nfast (version 1 of 2): " in out
    assert "you (version 1 of 2): one\n" in out
    with Store.open(data) as store:
        copy, original = store.chats()
        assert copy.title == "Copy"
        assert [m.text for m in store.path(copy.id) if m.role == "user"] == ["one", "more"]
        assert [branch.preview for branch in store.tree(original.id) if branch.role == "user"] == ["one", "uno"]


def test_a_reply_that_was_cut_is_gone_on_with_beside_it(data: Path) -> None:
    status, _, err = piped("one\n/continue\n", "fast", "--max-tokens", "5")
    assert (status, err) == (0, "")
    cut, longer = (m for m in _siblings(data) if m.role == "assistant")
    assert longer.text.startswith(cut.text)
    assert len(longer.text) > len(cut.text)


def test_a_prompt_without_a_reply_is_answered_by_going_on(data: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.md").write_text("## User\n\none\n\n## Assistant\n\nuno\n\n## User\n\ntwo\n")
    status, out, err = piped(f"/import {tmp_path / 'chat.md'}\n/continue\n", "fast")
    assert (status, err) == (0, "")
    assert out.count("every weight once per token") == 1
    assert [message.text for message in last_path(data)[:3]] == ["one", "uno", "two"]
    assert last_path(data)[3].role == "assistant"


def _siblings(data: Path) -> list[StoredMessage]:
    with Store.open(data) as store:
        return store.siblings(store.path(store.chats()[0].id)[-1].id)


def test_a_file_is_attached_and_stored_beside_the_words(data: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\x1b[2J")
    piped(f"/attach {tmp_path}/notes.md\nwhat is it?\n/attach {tmp_path}\nand now?\n", "fast")
    first, _, second, _ = last_path(data)
    assert (first.text, second.text) == ("what is it?", "and now?")
    assert [attachment.text for attachment in first.attachments] == ["# Notes�"]
    assert second.attachments == ()


def test_the_list_names_the_model_that_replied_last(data: Path) -> None:
    assert piped("one\n/model steady\ntwo\n/model fast\n", "fast")[0] == 0
    with Store.open(data) as store:
        (chat,) = store.chats()
    assert chat.model == "steady"


def test_settings_are_changed_and_a_bad_one_is_refused() -> None:
    _, out, err = piped("/settings temperature 0.25\n/settings key_bits 7\n/settings top_k many\n/settings\n", "fast")
    assert "temperature: 0.25 " in out
    assert "key_bits: 16 " in out
    assert "'many' is not valid" in err
    assert "7" in err


def test_a_system_prompt_holds_in_its_chat_alone() -> None:
    _, out, _ = piped(
        "hi\n/system Be brief.\n/system\n/new\n/system\n/chats\n/open 1\n/system\n/system none\n/system\n", "fast"
    )
    told = [line for line in out.splitlines() if line in ("Be brief.", "No system prompt.")]
    assert told == ["Be brief.", "No system prompt.", "Be brief.", "No system prompt."]


def test_every_command_of_the_registry_is_done_or_says_what_it_needs(tmp_path: Path) -> None:
    slashes = [action for action in ACTIONS if action.slash and action.id != "leave"]
    status, out, err = piped(
        "".join(f"/{action.slash}\n" for action in slashes), "fast", cwd=tmp_path, env={**os.environ, "EDITOR": "true"}
    )
    assert status == 0
    assert "There is no command" not in err
    for action in slashes:
        assert (action.id in COMMANDS) is (f"/{action.slash} needs the full screen" not in err)
        assert (action.id in COMMANDS) is (f"/{action.slash}" in out)  # the help lists it


def test_a_plan_that_was_asked_for_as_such_is_carried_out_all_the_same(tmp_path: Path) -> None:
    model, target = make_tiny(tmp_path / "tiny"), tmp_path / "tiny 8"
    asked = f"/convert {model} --dry-run --json --bits 8 -o '{target}' --no-verify\n/convert\n"
    status, _, err = piped(asked, "fast")
    assert status == 0
    assert err.splitlines()[-1] == f"/model {target} loads it."
    assert (target / "config.json").exists()


def test_where_the_model_belongs_is_said_where_it_stands_behind_the_flags() -> None:
    _, _, err = piped("/convert --bits 4 org/m\n/convert org/m --nosuch\n", "fast")
    behind, first, unknown = err.splitlines()
    assert behind.startswith("tokamac convert: unrecognized arguments: fast")
    assert first == MODEL_FIRST.format("convert")
    assert "--nosuch" in unknown


@pytest.mark.e2e
def test_the_embedded_guide_answers_without_a_screen(data: Path) -> None:
    program = [sys.executable, "-m", "tokamac.app.cli", "chat", "guide", "--temp", "0"]
    done = subprocess.run(program, input="What is prefill?\n", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    asked, reply = last_path(data)
    assert asked.text == "What is prefill?"
    assert reply.text
    assert done.stdout.strip() == reply.text.strip()


def test_what_is_piped_in_is_utf_8_where_the_locale_knows_no_more_than_ascii(data: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = spawn("fast", text=False, env=environment)
    process.communicate("Größe — 日本\n".encode(), timeout=PATIENCE_S)  # type: ignore[arg-type]  # bytes: text is off
    assert process.returncode == 0
    assert [message.text for message in last_path(data) if message.role == "user"] == ["Größe — 日本"]


def test_where_the_log_can_not_be_written_the_chat_goes_on_without_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, out, err = piped("hello\n", "fast", env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "file")})
    assert status == 0
    assert "Decode reads" in out
    assert err.count("log is not kept") == 1
