"""``tokamac chat --plain`` through pipes and on a terminal: prompts, commands, refusals, and leaving."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.app.plain.plain_chat import OBEYED, PATIENCE_S, Terminal, last_path, piped, sleeps, spawn
from tests.scripted_engine import LONG_CALL
from tests.waiting import until
from tokamac.app.chat.actions import ACTIONS, parse
from tokamac.app.chat.recording import LEFT
from tokamac.app.plain.commands import DONE
from tokamac.app.plain.console import Console, is_libedit
from tokamac.app.plain.repl import ENDED, NoKeys, completed
from tokamac.app.store.store import UNDO_S, Store
from tokamac.app.store.values import StoredMessage
from tokamac.app.tools.calls import STOPPED, STOPPED_RUNNING

pytestmark = pytest.mark.usefixtures("data")

# `tokamac chat` without a screen, through pipes.


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
    with spawn("fast", stdin=subprocess.DEVNULL) as process:
        assert process.wait(PATIENCE_S) == 0


def test_a_reader_that_leaves_ends_it_and_what_was_said_is_kept(data: Path) -> None:
    process = spawn("steady")
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


def _siblings(data: Path) -> list[StoredMessage]:
    with Store.open(data) as store:
        return store.siblings(store.path(store.chats()[0].id)[-1].id)


def test_a_file_is_attached_and_stored_beside_the_words(data: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\x1b[2J")
    piped(f"/attach {tmp_path}/notes.md\nwhat is it?\n/attach {tmp_path}/none.md\nand now?\n", "fast")
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


def test_a_setting_is_changed_by_other_programs_words_in_this_chat_or_everywhere(home: Path) -> None:
    lines = (
        "/set temperature 0.25", "/set parameter top_k 5", "/set top_k=7", "/set top_k 7", "/set tempreture 1", "/set top_k",
        "/show parameters", "/new", "/show settings", "/set everywhere top_p 0.9", "/show", "/show all", "/bye", "/show",
    )  # fmt: skip
    status, out, err = piped("".join(f"{line}\n" for line in lines), "fast")
    assert status == 0
    told = [
        line for line in err.splitlines() if line.startswith(("temperature", "top_", "There is no setting", "/show"))
    ]
    assert told == [
        "temperature is 0.25 in this chat; it was not set.",
        "top_k is 5 in this chat; it was not set.",
        "top_k is 7 in this chat; it was 5.",
        "top_k is 7 in this chat.",
        "There is no setting tempreture. Did you mean temperature?",
        "top_p is 0.9 in every chat without settings of its own; it was not set.",
        "/show takes model, settings, template, system, or nothing.",
    ]
    assert [line for line in out.splitlines() if "ettings" in line] == [
        "Settings that differ: temperature 0.25, top_k 7.",
        "All settings have their defaults.",
        "Settings that differ: top_p 0.9.",
    ]
    assert "top_k: 7 (0 is off;" in out
    assert "temperature" not in (home / "settings.toml").read_text()
    assert "top_p = 0.9" in (home / "settings.toml").read_text()


def test_a_turn_is_taken_back_and_nothing_is_deleted() -> None:
    _, out, err = piped("/undo\none\ntwo\n/undo\n/end\nthree\n/undo\n/undo\n/undo\n/branches\n/stats\n", "fast")
    assert err.count("Took the last turn back. /branches shows it.") == 3
    assert err.count("There is no turn to undo.") == 2
    assert "you: one" in out
    assert all(f": {said}" in out for said in ("two", "three"))
    assert "unknown" not in out


def test_the_prompt_of_an_earlier_turn_is_edited(data: Path) -> None:
    _, out, err = piped("/rewind\none\ntwo\n/rewind\n/rewind 3\n/rewind 1 uno\n/rewind\n", "fast")
    assert "There is no prompt to edit yet." in err
    assert "1. one\n2. two\n" in out
    assert "There is no prompt 3: /rewind lists them, 1 to 2." in err
    assert out.endswith("1. uno\n")
    assert [each.text for each in last_path(data) if each.role == "user"] == ["uno"]


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
        assert (action.id in DONE) is (f"/{action.slash} needs the full screen" not in err)
        assert (action.id in DONE) is (f"/{action.slash}" in out)  # the help lists it


@pytest.mark.e2e
def test_the_embedded_guide_answers_without_a_screen(data: Path) -> None:
    program = [sys.executable, "-m", "tokamac.app.cli", "chat", "guide", "--temp", "0"]
    done = subprocess.run(
        program, input="What is prefill?\n", capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    slow = r"(loading guide: .*|reading the prompt: \d+ of \d+ tokens|compiling kernels for this processor, once, for guide)\n"
    told = re.sub(slow, "", done.stderr)  # said on a machine that is slow, or new
    assert (done.returncode, told) == (0, "")
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


# `tokamac chat --plain` on a terminal of lines.


def test_on_a_terminal_text_has_a_speaker_and_nothing_moves_the_cursor(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain", TERM="dumb", NO_COLOR="1")
    chat.say("hi\n")
    chat.until("fast: Decode reads")
    chat.until("· first token ")
    assert chat.leave() == 0
    assert not OBEYED.search(chat.shown.decode().replace("\r\n", "\n"))
    assert re.search(r"tokamac chat --chat \w{8}", chat.shown.decode())


def test_a_hostile_reply_brings_no_sequence_of_its_own_to_a_terminal(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("hostile", "--plain", TERM="dumb", NO_COLOR="1")
    chat.type("hi\n/quit\n")
    assert chat.left() == 0
    assert "[bold]not markup[/]" in chat.shown.decode()
    assert not OBEYED.search(chat.shown.decode().replace("\r\n", "\n"))


def test_ctrl_c_stops_the_reply_and_twice_at_the_prompt_leaves(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("steady", "--plain")
    chat.say("hi\n")
    chat.until("steady: Deco")
    chat.type("\x03")
    chat.until("(stopped")
    chat.say("\x03")
    chat.until("Press Ctrl-C again to quit")
    chat.say("\x03")
    assert chat.left() == 130
    assert [m.state for m in last_path(data)] == ["complete", "stopped"]


def test_a_line_between_two_ctrl_c_stays(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")
    for text in ("\x03", "/stop\n", "\x03"):
        chat.say(text)
    chat.until("Press Ctrl-C again to quit")
    assert chat.leave() == 0


def test_the_last_prompt_is_edited_on_the_line(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("fast", "--plain")
    for text in ("one\n", "/edit\n", " and a half\n", "\x04"):
        chat.say(text)
    assert chat.left() == 0
    assert [m.text for m in last_path(data) if m.role == "user"] == ["one and a half"]


def test_an_unknown_chat_is_refused_before_a_screen_opens(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--chat", "zzzzzzzz")
    assert chat.left() == 1
    assert b"\x1b" not in chat.shown
    assert chat.shown.count(b"\n") == 1


def test_piped_into_a_terminal_it_is_plain(terminal: Callable[..., Terminal]) -> None:
    leader, follower = pty.openpty()
    process = spawn("fast", stdout=follower, stderr=follower, env={**os.environ, "TERM": "dumb"})
    os.close(follower)
    process.stdin.write("hi\n")
    process.stdin.close()
    shown = b""
    try:
        while more := os.read(leader, 4096):
            shown += more
    except OSError:
        pass
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    assert b"fast: Decode reads" in shown
    assert b"\x1b" not in shown


def test_a_terminal_that_only_prints_gets_plain_lines_and_one_that_says_so(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", TERM="dumb")
    chat.until("Plain chat, since TERM is dumb.")
    chat.say("hi\n")
    chat.until("fast: Decode reads")
    assert chat.leave() == 0
    assert b"\x1b" not in chat.shown


def test_where_the_screen_would_be_drawn_into_a_file_it_is_plain(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with (tmp_path / "errors").open("w") as errors:
        process = spawn("fast", stdin=follower, stdout=follower, stderr=errors, text=False)
    os.close(follower)
    shown = b""
    with suppress(OSError):
        while more := os.read(leader, 4096):
            shown += more
            if shown.endswith(b"you> "):
                os.write(leader, b"/quit\r")
    os.close(leader)
    assert process.wait(PATIENCE_S) == 0
    assert b"Plain chat, since stderr is not a terminal" in shown


@pytest.mark.parametrize(("program", "asked"), [("Apple_Terminal", False), ("ghostty", True)])
def test_terminal_app_is_asked_nothing_it_would_print(
    terminal: Callable[..., Terminal], program: str, asked: bool
) -> None:
    chat = terminal("fast", TERM_PROGRAM=program)
    chat.until("new chat")  # the first frame: what is asked was asked by now
    chat.type("\x11")
    assert chat.left() == 0
    assert (b"$p" in chat.shown) is asked


@pytest.mark.parametrize(
    ("doc", "printed"), [("Importing this module enables libedit readline.", True), ("GNU", False)]
)
def test_where_libedit_may_leave_the_line_empty_the_draft_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], doc: str, printed: bool
) -> None:
    stub = SimpleNamespace(__doc__=doc, set_startup_hook=lambda _=None: None, insert_text=lambda _: None)
    monkeypatch.setitem(sys.modules, "readline", stub)
    monkeypatch.setattr("builtins.input", lambda prompt: f"after {prompt}")
    console = Console()
    console._edits = console.shown = True
    assert console.read("you> ", "one\nand a half") == "after you> "
    assert ("one\nand a half\n" in capsys.readouterr().out) is printed
    assert console.read("you> ") == "after you> "
    assert capsys.readouterr().out == ""
    stub.backend = "readline" if printed else "editline"  # as newer Pythons say it
    assert is_libedit() is not printed


# `tokamac chat --plain`: what is a command and what a prompt, and how texts name what is done.


@pytest.mark.parametrize(
    "text",
    ["explain this", "/", "/ new", "/usr/bin", "/7", " /new", "/new\nmore", "/explain this:\nx = 1", "/no\nsuch"],
)
def test_what_is_no_command_is_a_prompt(text: str) -> None:
    assert parse(text, multiline=True) is None


@pytest.mark.parametrize(
    ("text", "word", "argument", "action"),
    [
        ("/new \n", "/new", "", "new_chat"),
        ("/Open  k3v7q2ab ", "/Open", "k3v7q2ab", "open"),
        ("/edit one\ntwo\n", "/edit", "one\ntwo", "edit"),
        ("/nosuch thing", "/nosuch", "thing", None),
    ],
)
def test_a_command_is_taken_apart(text: str, word: str, argument: str, action: str | None) -> None:
    found = parse(text, multiline=True)
    assert (found.word, found.argument, found.action and found.action.id) == (word, argument, action)


def test_several_lines_follow_only_the_commands_that_take_them() -> None:
    assert parse("/edit one\ntwo") is None


def test_a_block_that_begins_like_a_command_is_a_prompt(data: Path) -> None:
    _, out, err = piped(
        '"""\n/explain this:\nx = 1\n"""\n/system Be\\\nbrief.\n/system\n"""\n/edit one\ntwo\n"""\n', "fast"
    )
    assert err.splitlines() == [
        "The system prompt applies to this chat from the next message on. /system none removes it."
    ]
    assert "Be\nbrief.\n" in out
    assert [message.text for message in last_path(data) if message.role == "user"] == ["one\ntwo"]
    piped("/older\nmore\n", "fast", "--continue")
    assert [m.text for m in last_path(data) if m.role == "user"] == ["/explain this:\nx = 1", "more"]


def test_the_help_says_what_must_follow_and_what_may() -> None:
    _, out, _ = piped("/help\n", "fast")
    lines = out.splitlines()
    for begin in ("/guide QUESTION: ", "/model [NAME]: ", "/detach [NAME]: ", "/open NUMBER|ID: ", "/edit [TEXT]: "):
        assert sum(line.startswith(begin) for line in lines) == 1


def test_where_there_are_no_keys_none_is_named() -> None:
    named = NoKeys()
    keys = [named.key(each) for each in ("choose_model", "settings", "explain", "stop")]
    assert keys == ["/model", "/settings", "/explain", "Ctrl-C"]
    _, out, _ = piped("/gauges KV\n", "fast")
    assert "(settings (/settings))" in out
    assert "Ctrl+" not in out


def test_a_model_whose_loading_is_stopped_is_chosen_by_a_command(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("slow-load", "--plain", TERM="dumb", NO_COLOR="1")
    chat.say("/unload\n")
    chat.until("Loading was stopped. /model chooses a model; sending a prompt loads this one.")
    chat.say("/unload\n")
    chat.until("No model is loaded.")
    assert chat.leave() == 0


# `tokamac chat --plain`: Tab completes commands, and a misspelt one is told the nearest.


def test_a_command_is_completed_where_a_line_begins_and_a_setting_after_its_command() -> None:
    assert completed("", "/ti") == ["/title "]
    assert completed("", "/NEW") == ["/new", "/newer"]
    assert "/quit" in completed("", "/")
    assert completed("", "/pan") == []  # it needs the full screen
    assert completed("/settings ", "top") == ["top_p ", "top_k "]
    assert completed("/set ", "min_p") == ["min_p "]
    assert completed("/settings top_p ", "t") == []
    for before, begun in (("", "ti"), ("what is ", "/ti"), (" ", "/ti"), ("/title ", "/ti")):
        assert completed(before, begun) == []


def test_pasted_lines_are_one_message(data: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain", TERM="xterm")
    chat.until("\x1b[?2004h")  # the terminal is asked to mark what is pasted
    chat.say("\x1b[200~first\nsecond\nthird\x1b[201~ line\n")
    chat.until("tok/s")
    assert chat.leave() == 0
    with Store.open(data) as store:
        prompts = [each.text for each in store.path(store.chats()[0].id) if each.role == "user"]
    assert prompts == ["first\nsecond\nthird line"]


def test_tab_completes_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")
    chat.say("/sett\ttemp\t0.5\n")
    chat.until("temperature is 0.5 in this chat; it was not set.")
    chat.say("/settings\n")
    chat.until("temperature: 0.5")
    assert chat.leave() == 0


def test_a_misspelt_command_is_told_the_nearest() -> None:
    _, _, err = piped("/titel Keys\n/nosuch\n", "fast")
    assert err.splitlines() == [
        "There is no command /titel; did you mean /title? /help lists them. To send this as a prompt, put a space before it.",
        "There is no command /nosuch. /help lists them. To send this as a prompt, put a space before it.",
    ]


# `tokamac chat --plain`: a prompt that is refused is told why, and given back only to who can write it anew.

WHY = " alone is "
STILL = "Still attached to the next prompt: "


@pytest.fixture
def long_notes(tmp_path: Path) -> Path:
    """A file that the context of ``tiny-context`` has no room for."""
    path = tmp_path / "notes.md"
    path.write_text("keys and values " * 20)
    return path


@pytest.fixture
def tiny_terminal() -> Iterator[Terminal]:
    shown = Terminal("tiny-context", "--plain")
    yield shown
    shown.end()


def prompts(data: Path) -> list[tuple[str, int]]:
    return [(m.text, len(m.attachments)) for m in last_path(data) if m.role == "user"]


def test_in_a_pipe_what_was_refused_does_not_go_with_the_next_line(data: Path, long_notes: Path) -> None:
    status, out, err = piped(f"/attach {long_notes}\nWhat is it?\nyes\n", "tiny-context")
    assert status == 1
    assert err.count(WHY) == 1
    assert STILL not in err
    assert "Decode reads" in out
    assert prompts(data) == [("yes", 0)]


def test_on_a_terminal_it_is_written_again_with_its_files(
    data: Path, long_notes: Path, tiny_terminal: Terminal
) -> None:
    tiny_terminal.say(f"/attach {long_notes}\n")
    tiny_terminal.until("Attached to the next prompt")
    tiny_terminal.say("yes\n")
    tiny_terminal.until(WHY)
    tiny_terminal.until(f"{STILL}{long_notes}. /detach removes the last one.")
    tiny_terminal.until("you> yes")
    tiny_terminal.type("\x15/detach\n")
    tiny_terminal.until("Detached")
    tiny_terminal.until("you> yes")
    tiny_terminal.type("\n")
    tiny_terminal.until("Decode reads")
    assert tiny_terminal.leave() == 0
    assert prompts(data) == [("yes", 0)]


# `tokamac chat --plain`: what is written and not sent when another chat is begun or opened.


def drafts(data: Path) -> dict[str, str]:
    """The drafts of all chats, by title."""
    with Store.open(data) as store:
        return {chat.title: chat.draft for chat in store.chats()}


def test_what_is_attached_stays_with_the_chat_that_is_left_and_it_is_said(data: Path, notes: Path) -> None:
    status, _, err = piped(f"about keys\n/attach {notes}\n/new\nabout pears\n", "fast")
    assert (status, err.count(LEFT)) == (0, 1)
    assert [(m.text, m.attachments) for m in last_path(data) if m.role == "user"] == [("about pears", ())]
    assert {title: "keys and values" in draft for title, draft in drafts(data).items()} == {
        "about keys": True,
        "about pears": False,
    }


def test_it_is_not_lost_where_the_same_chat_is_opened_again(data: Path, notes: Path) -> None:
    _, _, err = piped(f"about keys\n/attach {notes}\n/chats\n/open 1\nand these?\n", "fast")
    assert LEFT not in err
    (*_, prompt) = (m for m in last_path(data) if m.role == "user")
    assert [each.name for each in prompt.attachments] == [str(notes)]


def test_where_nothing_is_kept_it_goes_along(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "blocked"))
    _, _, err = piped(f"/attach {notes}\n/new\n/detach {notes}\n", "fast")
    assert LEFT not in err
    assert f"Detached: {notes}." in err


# The plain chat in a script whose model does not load: commands are done, a prompt ends it, and the status tells.


@pytest.fixture
def _kept(data: Path, home: Path) -> None:
    """What is kept is the test's own."""


@pytest.mark.usefixtures("_kept")
def test_without_a_model_commands_are_done_and_the_status_tells() -> None:
    status, out, err = piped("/model nobody\n/chats\n/system Be brief.\n/system\n", "nobody")
    assert (status, out) == (1, "No chats yet.\nBe brief.\n")
    assert "no scenario is called 'nobody'" in err
    assert ENDED not in err


@pytest.mark.usefixtures("_kept")
def test_a_prompt_that_no_model_answers_ends_the_chat_and_that_is_said() -> None:
    status, out, err = piped("/model nobody\n/chats\ntwo\n/chats\n", "nobody")
    assert (status, out) == (1, "No chats yet.\n")
    assert err.splitlines()[-1] == ENDED


@pytest.mark.usefixtures("_kept")
def test_another_model_may_be_chosen_and_the_status_still_tells(data: Path) -> None:
    status, _, err = piped("/model nobody\n/model steady\ntwo\n", "nobody")
    assert status == 1
    assert "steady is loaded." in err
    assert [message.text for message in last_path(data) if message.role == "user"] == ["two"]


@pytest.mark.usefixtures("_kept")
def test_a_mistyped_model_leaves_the_one_that_was_loaded(data: Path) -> None:
    status, out, err = piped("/model nobody\n/title Kept\nhello\n/model\n", "fast")
    assert status == 1
    assert "Going back to fast." in err
    assert out.splitlines()[-1] == "fast"
    assert [message.text for message in last_path(data) if message.role == "user"] == ["hello"]


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("model", ["dies-loading", "dies-decoding"])
def test_where_nobody_types_no_restart_is_promised_that_does_not_come(model: str) -> None:
    status, _, err = piped("one\ntwo\nthree\n", model)
    assert status == 1
    assert err.count("The engine stopped") == 2
    assert "when you send a prompt" not in err
    assert err.splitlines()[-1] == ENDED


# A shell command, and a call of the model's: both are asked for.


@pytest.mark.usefixtures("home")
def test_a_shell_command_is_asked_for_and_its_output_goes_with_the_next_prompt(
    data: Path, tmp_path: Path, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = terminal("fast", "--plain", SHELL="/bin/sh")
    shown.say("!touch made\n")
    shown.until("[n]o> ")
    shown.type("\n")
    shown.until("was not run")
    shown.say("!echo out; exit 3\n")
    shown.until(f"runs in {str(tmp_path)[:30]}")
    shown.until("[n]o> ")
    shown.type("y\n")
    shown.until("exit status 3")
    shown.until("Attached to the next prompt: !echo out; exit 3")
    shown.say("!echo begun; touch begun; sleep 600\n")
    shown.until("[n]o> ")
    shown.type("y\n")
    until((tmp_path / "begun").exists)
    shown.type("\x03")
    shown.until("stopped by you")
    shown.say("\\!Why?\n")
    shown.until("every weight once per token")
    assert shown.leave() == 0
    asked = last_path(data)[0]
    assert asked.text == "!Why?"
    assert [(each.name, each.text.split("\n")[1]) for each in asked.attachments] == [
        ("!echo out; exit 3", "out"),
        ("!echo begun; touch begun; sleep 600", "begun"),
    ]
    assert not (tmp_path / "made").exists()


@pytest.mark.usefixtures("home")
def test_in_a_pipe_no_shell_command_runs(data: Path, tmp_path: Path) -> None:
    status, _, err = piped(f"!touch {tmp_path / 'made'}\n !one\n", "fast")
    assert status == 1
    assert "Nobody is here to allow a shell command" in err
    assert not (tmp_path / "made").exists()
    assert prompts(data) == [("!one", 0)]


@pytest.mark.usefixtures("home")
def test_a_call_of_the_models_is_asked_for_on_a_terminal_and_refused_in_a_pipe(
    data: Path, tmp_path: Path, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("milk")
    shown = terminal("calls", "--plain")
    shown.say("/tools on\n")
    shown.until("Tools on in this chat")
    shown.say("What shall I bring?\n")
    shown.until("The model wants to call:")
    shown.until("path: notes.md")
    shown.until("[d]eny> ")
    shown.type("what\n")  # no decision: it asks again
    shown.until("[d]eny> ")
    shown.type("c\n")
    shown.until("calling read_file")
    shown.until("[d]eny> ")
    shown.type("d\n")
    shown.until("not run")
    shown.say("/tools\n")
    shown.until("(allowed in this chat)")
    shown.say("/tools ask read_file\n")
    shown.until("Every call of read_file asks you again")
    assert shown.leave() == 0
    results = [(each.text, each.state) for each in last_path(data) if each.role == "tool"]
    assert results[0] == ("milk", "complete")
    assert results[1][1] == "stopped"
    status, _, err = piped("/tools on\nAnd?\n", "calls")
    assert status == 0
    assert err.count("Nobody is here to allow it") == 2
    _, out, err = piped("/tools on\nAnd?\n", "calls-unreadably")
    assert out.count("I look.") == 2
    assert "Stopped: the model's calls could not be read, twice in a row." in err


@pytest.mark.usefixtures("home")
def test_what_is_to_be_allowed_is_shown_whole(terminal: Callable[..., Terminal]) -> None:
    shown = terminal("calls-at-length", "--plain", SHELL="/bin/sh")
    shown.say("/tools on calculate\n")
    shown.until("Tools on in this chat")
    shown.say("And?\n")
    shown.until("The model wants to call:\r\ncalculate\r\n")
    first, second = json.loads(LONG_CALL.arguments)["expression"].split("\n")
    shown.until(f"  expression: {first}\r\n  │ {second}\r\n")
    shown.until("[d]eny> ")
    shown.type("d\n")
    shown.until("not run")
    shown.until("you> ")
    word = "x" * 300
    shown.type(f"!echo {word}; \\\necho two\n")
    shown.until("attached to the next prompt:")
    shown.until(f"echo {word}; \r\necho two\r\n")
    shown.until("[n]o> ")
    shown.type("n\n")
    assert shown.leave() == 0


@pytest.mark.usefixtures("home")
def test_ctrl_c_where_a_call_is_asked_for_stops_at_once(data: Path, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("calls", "--plain")
    shown.say("/tools on\n")
    shown.until("Tools on in this chat")
    shown.say("What shall I bring?\n")
    shown.until("[d]eny> ")
    until(lambda: sleeps(shown.process.pid))  # reading a line misses a Ctrl-C between its prompt and its wait
    shown.type("\x03")
    shown.until('read_file("notes.md"): not run')
    shown.until('calculate("6 * 7"): not run')
    shown.until("you> ")
    shown.type("\x03")  # as before at the prompt
    shown.until("Press Ctrl-C again to quit")
    assert shown.leave() == 0
    results = [(each.text, each.state) for each in last_path(data) if each.role == "tool"]
    assert results == [(STOPPED, "stopped")] * 2


SLOW_SERVER = '''
import time
from pathlib import Path
from mcp.server import MCPServer
app = MCPServer("slow")

@app.tool()
def send() -> str:
    """Send it."""
    Path("sent").touch()
    time.sleep(600)
    return ""

app.run("stdio")
'''


@pytest.mark.usefixtures("home")
def test_ctrl_c_while_a_call_runs_says_that_it_ran(
    data: Path, tmp_path: Path, terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SLOW_SERVER)
    server = tmp_path / "settings.toml"
    server.write_text(
        f'[tools]\nallowed = ["slow_send"]\n[mcp.slow]\ncommand = "{sys.executable}"\nargs = ["{tmp_path}/server.py"]\n'
    )
    shown = terminal("calls-a-server", "--plain", TEST_SETTINGS=str(server))
    shown.say("/tools on slow\n")
    shown.until("you> ")

    def ready() -> bool:
        shown.type("/tools\n")
        shown.until("you> ")
        return b"slow is ready: 1 tool." in shown.shown  # it is told between two lines

    until(ready)
    shown.type("Send it.\n")
    shown.until("calling slow_send")
    until((tmp_path / "sent").exists)
    shown.type("\x03")
    shown.until(f"slow_send(): {STOPPED_RUNNING}")
    assert shown.leave() == 0
    (result,) = [each for each in last_path(data) if each.role == "tool"]
    assert (result.text, result.state) == (STOPPED_RUNNING, "failed")


# Several versions of a reply ---------------------------------------------------------------------------------------------


def test_versions_are_printed_whole_in_their_order(data: Path) -> None:
    status, out, err = piped("hi\n/compare temperature 0 0.7 1.5\n/newer\n/quit\n", "fast")
    assert status == 0
    assert "Writing 3 versions at once." in err
    assert "Written together: their speeds can't be compared." in err
    assert "The chat goes on from version 1. /older and /newer switch to the others." in err
    _, *printed = re.split(r"\n(Version \d of 3 · temperature [\d.]+)\n", out.split("\nTurn")[0])
    assert printed[::2] == [f"Version {n} of 3 · temperature {t}" for n, t in ((1, "0"), (2, "0.7"), (3, "1.5"))]
    assert all("every weight once per token" in text for text in printed[1::2])
    assert "(version 3 of 4)" in out  # of all replies to this prompt, the one before them included
    with Store.open(data) as store:
        chat = store.latest()
        replies = [each.state for each in store.archive(chat.id).messages if each.role == "assistant"]
    assert replies == ["complete"] * 4


def test_a_version_that_fails_is_said_in_its_place() -> None:
    status, out, err = piped("hi\n/compare kv-bits 8 16\n", "unpackable")
    assert status == 1
    assert out.index("Version 1 of 2 · KV 8 bits") < out.index("Version 2 of 2 · KV 16 bits")
    assert "The chat goes on from version 2." in err
    assert "more than one version" not in err


def test_what_versions_say_is_made_safe_and_refusals_are_said() -> None:
    _, out, err = piped(
        "hi\n/again 2\n/again nine\n/again 9\n/compare order \x1b[2J a b\n/compare seed 1 2\n", "hostile"
    )
    assert not OBEYED.search(out)
    assert not OBEYED.search(err)
    assert "nine is not a number of versions" in err
    assert "2 to 8 versions are written at once, not 9" in err
    assert "order can't be compared" in err
    assert out.count("Version 2 of 2 · seed 2") == 1


def test_ctrl_c_stops_all_versions(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("slow", "--plain")
    chat.say("hi\r")
    chat.until("Decode reads")
    chat.type("\x03")
    chat.until("(stopped")
    chat.type("/compare temperature 0 1\r")
    chat.until("Writing 2 versions at once.")
    chat.type("\x03")
    chat.until("Version 1 of 2 · temperature 0")
    chat.until("The chat goes on from version 1.")
    chat.say("/quit\r")
    assert chat.left() == 0
    with Store.open(data) as store:
        kept = store.latest()
        replies = [each.state for each in store.archive(kept.id).messages if each.role == "assistant"]
    assert replies == ["stopped"] * 3


# A reply that repeats itself, a context that is full, a prompt that fails.


def test_a_loop_ends_a_reply_in_lines_at_once() -> None:
    status, out, err = piped("one\n", "loops")
    assert (status, len(out.strip())) == (0, 20)
    assert "stopped: it repeats itself" in err
