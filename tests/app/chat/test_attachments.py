"""Files that go with a prompt, folders that macOS keeps private, the user's editor, and the clipboard."""

import base64
import errno
import os
import re
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.app import cli
from tokamac.app.backend.processes import ShellOutput
from tokamac.app.chat import attachments, external_programs
from tokamac.app.chat.attachments import (
    LONGEST_COMMAND,
    MOST_IN_FOLDER,
    AttachError,
    Draft,
    apart,
    attachment,
    is_long,
    joined,
    output_of,
    pasted,
    read_file,
    read_named,
    shell_command,
)
from tokamac.app.chat.external_programs import EditorError, edit_text, editor_command
from tokamac.app.commands import prompts
from tokamac.app.commands.bench import kv_quality, report
from tokamac.app.store import export, values
from tokamac.app.store.values import Attachment
from tokamac.app.text.sanitise import sanitise
from tokamac.app.tui.widgets.prompt_input import Finder, PartialPath, path_at, ranked
from tokamac.engine.errors import ALLOW, TokamacError
from tokamac.engine.model.config import read_config
from tokamac.quant import streaming
from tokamac.quant.resume import writing_to

# What goes with a prompt: how it enters the message, which files are taken, and how they are found by a part of
# their path.

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), min_size=1)
TEXTS = st.text() | st.text("`\n ab")


@given(st.lists(st.tuples(NAMES, TEXTS)), st.lists(TEXTS), st.text())
def test_a_message_comes_apart_into_its_parts(files: list[tuple[str, str]], pastes: list[str], words: str) -> None:
    attachments = [attachment(f"{name}.md", text) for name, text in files]
    for paste in pastes:
        attachments.append(pasted(paste, attachments))
    draft = Draft(f"> {words}", tuple(attachments))  # no file begins so
    assert apart(draft.whole) == draft


def test_an_attachment_stands_in_a_block_that_it_cannot_end() -> None:
    draft = Draft("Why?", (Attachment("a.py", "x = '```'\n````\ny = 1", "code"),))
    assert draft.whole == "File a.py:\n`````\nx = '```'\n````\ny = 1\n`````\n\nWhy?"


@given(st.text(min_size=1).filter(lambda text: sanitise(text).strip()), st.text(), st.integers(-9, 9))
def test_what_a_command_wrote_comes_apart_under_its_name(command: str, wrote: str, status: int) -> None:
    made = output_of(ShellOutput(command, sanitise(wrote).strip("\n"), status))
    draft = Draft("Why?", (made, attachment("a.py", "x")))
    assert apart(draft.whole) == draft
    assert len(made.name) <= 1 + LONGEST_COMMAND


def test_the_model_is_told_the_command_its_output_and_how_it_ended() -> None:
    made = output_of(ShellOutput("make test", "two failed", 2))
    assert made.name == "!make test"
    assert Draft("Why?", (made,)).whole == (
        "Shell command make test:\n```\n$ make test\ntwo failed\n[exit status 2]\n```\n\nWhy?"
    )
    assert output_of(ShellOutput("true", "", 0)).text == "$ true\n[no output]"


@pytest.mark.parametrize(
    ("text", "command"), [("!ls -l", "ls -l"), ("!", ""), (" !ls", None), ("\\!ls", None), ("ls!", None), ("", None)]
)
def test_a_text_that_begins_with_an_exclamation_mark_is_a_command(text: str, command: str | None) -> None:
    assert shell_command(text) == command


def test_attachments_alone_are_a_message_and_nothing_is_none() -> None:
    assert Draft("", (Attachment("a.txt", "a"),)).whole == "File a.txt:\n```\na\n```"
    assert Draft().whole == ""


def test_pasted_texts_are_numbered_after_those_that_are_there() -> None:
    first = pasted("one", [])
    second = pasted("two", [first])
    assert [first.name, second.name] == ["pasted text 1", "pasted text 2"]
    assert pasted("three", [second]).name == "pasted text 3"


def test_several_drafts_become_one_in_their_order() -> None:
    a, b = Attachment("a", "1"), Attachment("b", "2")
    assert joined([Draft("one", (a,)), Draft("", (b,)), Draft("two")]) == Draft("one\n\ntwo", (a, b))


@pytest.mark.parametrize(
    ("text", "long"), [("x" * 2_000, False), ("x" * 2_001, True), ("x\n" * 29, False), ("x\n" * 30, True)]
)
def test_a_long_paste_is_long_by_characters_or_by_lines(text: str, long: bool) -> None:
    assert is_long(text) is long


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_attached(text: str) -> None:
    for made in (attachment(text, text), pasted(text, [])):
        assert sanitise(made.text) == made.text
        assert made.name.isprintable() or made.name == sanitise(made.name)


# Files ------------------------------------------------------------------------------------------------------------------


def test_text_files_are_read_whatever_their_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfn,s\r\n1,2\r\n")
    (tmp_path / "b.txt").write_bytes("grüße".encode("utf-16"))
    assert read_file("a.csv", tmp_path) == Attachment("a.csv", "n,s\n1,2", "csv")
    assert read_file(str(tmp_path / "b.txt"), Path("/")).text == "grüße"


def test_a_hostile_file_is_made_safe_in_its_text_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2Jb.txt").write_text("x\x1b]52;c;aGk=\x07y\u202ez")
    made = read_file("a\x1b[2Jb.txt", tmp_path)
    assert (made.name, made.text) == ("a�b.txt", "x�y�z")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.txt", "There is no file none.txt"), ("folder", "folder is a folder"),
        ("data.bin", "data.bin is a binary file"), ("latin.txt", "latin.txt is not UTF-8 text"),
        ("pipe", "pipe is not a regular file"), ("socket", "socket is not a regular file"),
        ("large.txt", "large.txt has 4.0 MB; the limit is 4"), ("a\0b", "a�b can't be read"),
        ("~nobody-of-that-name/x", "There is no file ~nobody-of-that-name/x"),
        ("/dev/zero", "/dev/zero is not a regular file"),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused_by_name_and_at_once(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "data.bin").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (tmp_path / "large.txt").write_bytes(b"x" * (attachments.LARGEST_TEXT_BYTES + 1))
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(tmp_path)  # the path of a socket may have a hundred characters at most
        try:
            listening.bind("socket")
        finally:
            os.chdir(here)
        with pytest.raises(AttachError, match="^" + said.replace(".", r"\.")):
            read_file(name, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_the_user_may_not_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(AttachError, match="Permission denied"):
        read_file("secret.txt", tmp_path)


def test_a_link_is_followed_as_the_user_would(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "lost.txt").symlink_to("nowhere")
    assert read_file("link.txt", tmp_path) == Attachment("link.txt", "text")
    with pytest.raises(AttachError, match=r"There is no file lost\.txt"):
        read_file("lost.txt", tmp_path)


def pdf(*pages: str) -> bytes:
    """A PDF whose pages hold these lines."""
    texts = [f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET".encode() for page in pages]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(texts):
        page = f"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R >>"
        objects += [page.encode(), b"<< /Length %d >>\nstream\n%s\nendstream" % (len(text), text)]
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)


def test_the_text_of_a_pdf_is_attached(tmp_path: Path) -> None:
    (tmp_path / "paper.pdf").write_bytes(pdf("Decode reads weights", "Prefill multiplies"))
    assert read_file("paper.pdf", tmp_path) == Attachment(
        "paper.pdf", "Decode reads weights\n\nPrefill multiplies", "pdf"
    )


def test_a_pdf_without_text_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(pdf(""))
    (tmp_path / "no.pdf").write_bytes(b"%PDF-1.4\nnothing of the kind")
    with pytest.raises(AttachError, match="it contains no text, only images"):
        read_file("scan.pdf", tmp_path)
    with pytest.raises(AttachError, match=r"no\.pdf can't be attached"):
        read_file("no.pdf", tmp_path)


# Finding ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("@", PartialPath(0, "")), ("see @app/tu", PartialPath(4, "app/tu")), ("(@x", PartialPath(1, "x")),
        ("somebody@home", None), ("@done and more", None), ("", None),
    ],
)  # fmt: skip
def test_a_file_is_named_in_a_word_that_begins_with_an_at_sign(line: str, found: PartialPath | None) -> None:
    assert path_at(line, len(line)) == found
    assert path_at(line + " more", len(line)) == found


def test_names_that_begin_so_go_before_those_that_hold_it_and_scattered_letters_come_last() -> None:
    paths = ["map/at.txt", "tests/chap.py", "cats/x.py", "chat.py", "deep/chat.py", "other.py"]
    assert ranked("chat", paths) == ["chat.py", "deep/chat.py"]
    assert ranked("cha", paths) == ["chat.py", "deep/chat.py", "tests/chap.py"]
    assert ranked("cat", paths) == ["cats/x.py", "chat.py", "deep/chat.py"]
    assert ranked("x", paths, most=1) == ["cats/x.py"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("src/deep/engine.py", "src/engine.md", "node_modules/engine.js", ".git/engine", "notes/a b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "src" / "loop").symlink_to(tmp_path)
    return tmp_path


def test_a_part_is_found_anywhere_below_but_not_in_hidden_folders_or_round_a_link(tree: Path) -> None:
    finder = Finder(tree)
    assert finder.find("engine") == ["src/engine.md", "src/deep/engine.py"]
    assert finder.find("b.t") == ["notes/a b.txt"]


def test_a_path_is_followed_folder_by_folder(tree: Path) -> None:
    finder = Finder(tree / "src", lambda: 0.0)
    assert finder.find("..")[0] == "../src/"
    assert finder.find("../no") == ["../notes/", "../node_modules/"]
    assert finder.find("../notes/") == ["../notes/a b.txt"]
    assert finder.find("../.g") == ["../.git/"]
    assert finder.find(f"{tree}/notes/a") == [f"{tree}/notes/a b.txt"]
    assert finder.find("../none/x") == finder.find("~nobody-of-that-name/") == []


def test_new_files_are_found_after_a_while(tree: Path) -> None:
    now = time.monotonic()
    finder = Finder(tree, lambda: now)
    assert finder.find("fresh") == []
    (tree / "fresh.txt").write_text("x")
    assert finder.find("fresh") == []
    now += 10
    assert finder.find("fresh") == ["fresh.txt"]


def test_a_name_that_a_terminal_would_obey_is_not_offered(tree: Path) -> None:
    (tree / "evil\x1b[2J.txt").write_text("x")
    (tree / os.fsdecode(b"\xff.txt")).write_text("x")
    assert not [path for path in Finder(tree).find("txt") if path != "notes/a b.txt"]


# Folders that macOS keeps private (Desktop, Documents, Downloads, other disks): where it refuses one, what opens it
# is said.

SETTINGS = "System Settings > Privacy & Security > Files and Folders"


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_: object, **__: object) -> Any:
        raise PermissionError(number, os.strerror(number))

    return refused


@pytest.fixture
def desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: Callable[[str], None], no_stdin: None) -> Path:
    """A folder in which nothing may be opened, on a Mac."""
    folder = tmp_path / "Desktop"
    folder.mkdir()
    (folder / "notes.md").write_text("notes")
    (folder / "config.json").write_text("{}")
    for holder, name in ((os, "open"), (Path, "open")):
        monkeypatch.setattr(holder, name, refuse(errno.EPERM))
    on("darwin")
    return folder


def convert(folder: Path) -> None:
    with writing_to(folder / "mine-4bit"):
        os.open(folder / "mine-4bit", os.O_WRONLY)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: read_file("notes.md", folder),
        lambda folder: prompts.compose("what?", [str(folder / "notes.md")]),
        lambda folder: kv_quality._read(str(folder / "notes.md")),
        lambda folder: streaming.calibration_text(folder / "notes.md"),
        lambda folder: export.read(folder / "notes.md", now=0.0),
        lambda folder: export.write(folder / "new.md", "text"),
        lambda folder: report.write(folder / "plot.svg", None),  # type: ignore[arg-type]  # not drawn: it can't be written
        read_config,
        convert,
    ],
)
def test_only_a_mac_says_what_opens_a_private_folder(
    desktop: Path, on: Callable[[str], None], use: Callable[[Path], object]
) -> None:
    with pytest.raises(TokamacError) as found:
        use(desktop)
    assert SETTINGS in found.value.hint
    assert "Operation not permitted" in found.value.message

    on("linux")
    with pytest.raises(TokamacError) as found:
        use(desktop)
    assert SETTINGS not in found.value.hint


def test_rights_of_a_file_are_not_taken_for_privacy(desktop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refuse(errno.EACCES))
    with pytest.raises(TokamacError) as found:
        read_file("notes.md", desktop)
    assert found.value.hint == "Check its permissions."


def test_the_store_and_the_unexpected_say_it_too(
    tmp_path: Path, on: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on("darwin")
    problem = PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(tmp_path))
    assert values.refused(tmp_path, problem).hint == f"{ALLOW}."
    assert cli._failed(problem, json_wanted=False) == 1
    assert capsys.readouterr().err == f"tokamac: {tmp_path}: Operation not permitted. {ALLOW}.\n"


# The user's own editor: what it saved is the prompt, and is never lost where it fails.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file that is edited lies."""
    made = tmp_path / "edited"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


def shell(script: str) -> list[str]:
    """An editor that does this with the file ``$1``."""
    return ["sh", "-c", script, "editor"]


def test_what_was_saved_is_returned_without_control_characters_and_the_file_is_gone(folder: Path) -> None:
    assert edit_text(shell("printf ' and \\033[31mmore\\n\\n' >> $1"), "first") == "first and �more"
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("end", "how"), [("exit 3", "ended with status 3"), ("kill -9 $$", "was killed by SIGKILL")])
def test_what_an_editor_saved_before_it_failed_is_kept(folder: Path, end: str, how: str) -> None:
    with pytest.raises(EditorError, match=how) as failed:
        edit_text(shell(f"printf 'all of it' > $1; {end}"), "first")
    (kept,) = folder.iterdir()
    assert str(failed.value) == f"sh {how}; the prompt is unchanged. What it saved is in {kept}."
    assert kept.read_text() == "all of it"
    assert kept.stat().st_mode & 0o777 == 0o600


def test_an_editor_that_fails_and_saved_nothing_leaves_nothing(folder: Path) -> None:
    with pytest.raises(EditorError, match=r"^sh ended with status 1; the prompt is unchanged\.$"):
        edit_text(shell("exit 1"), "first")
    with pytest.raises(EditorError, match="could not be used"):
        edit_text([str(folder / "no-such-editor")], "first")
    assert not list(folder.iterdir())


def test_what_is_no_text_is_kept_and_named(folder: Path) -> None:
    with pytest.raises(EditorError, match="is not UTF-8") as failed:
        edit_text(shell("printf '\\377\\376' > $1"), "first")
    (kept,) = folder.iterdir()
    assert str(kept) in str(failed.value)
    assert kept.read_bytes() == b"\xff\xfe"


def test_an_editor_that_removes_the_file_is_told_of(folder: Path) -> None:
    with pytest.raises(EditorError, match=re.escape("sh could not be used")):
        edit_text(shell("rm $1"), "first")
    assert not list(folder.iterdir())


def test_which_editor() -> None:
    assert editor_command({"VISUAL": "code --wait", "EDITOR": "vi"}) == ["code", "--wait"]
    assert editor_command({"VISUAL": "", "EDITOR": "vi"}) == ["vi"]
    with pytest.raises(EditorError, match="is not a valid command"):
        editor_command({"EDITOR": "vi '"})


@pytest.mark.parametrize(
    ("here", "found"), [(("nano", "vi"), ["nano"]), (("vi",), ["vi"]), ((), None)], ids=["both", "one", "none"]
)
def test_where_none_is_set_one_here_is_taken(tmp_path: Path, here: tuple[str, ...], found: list[str] | None) -> None:
    for name in here:
        (tmp_path / name).touch(mode=0o755)
    if found is None:
        with pytest.raises(EditorError, match="set EDITOR"):
            editor_command({"PATH": str(tmp_path)})
    else:
        assert editor_command({"PATH": str(tmp_path), "EDITOR": ""}) == found


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ("code", ["code", "--wait"]),
        ("code --wait -n", ["code", "--wait", "-n"]),
        ("/usr/local/bin/subl -w", ["/usr/local/bin/subl", "-w"]),
        ("'/Applications/Zed.app/Contents/MacOS/zed' -n", ["/Applications/Zed.app/Contents/MacOS/zed", "--wait", "-n"]),
        ("mvim", ["mvim", "--nofork"]),
        ("open -a TextEdit", ["open", "-W", "-a", "TextEdit"]),
        ("nvim -f", ["nvim", "-f"]),
    ],
)
def test_an_editor_with_a_window_is_told_to_wait(given: str, command: list[str]) -> None:
    assert editor_command({"EDITOR": given}) == command


# Copying where no tool of the system's takes the text: the terminal is asked, tmux passes it on, and a file holds
# it for sure.

Start = Callable[..., Any]
TEXT = "naïve\ttabs\r\nand lines 🙂"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the terminal is sent, beside rows."""
    monkeypatch.setattr(external_programs, "_tool", lambda: None)
    monkeypatch.delenv("TMUX", raising=False)
    return []


async def copied(c: Any, sent: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.setattr(c.app._driver, "write", sent.append)
    return external_programs.copy_text(TEXT, folder, c.app.copy_to_clipboard)


def asked_for(sequence: str) -> str:
    found = re.fullmatch(r"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", sequence)
    assert found
    return base64.b64decode(found[1]).decode()


async def test_the_terminal_and_a_private_file_get_the_text_exactly(
    chat: Start, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat("fast", ready=False) as c:
        said = await copied(c, written, monkeypatch, tmp_path / "home")
    file = tmp_path / "home" / external_programs.FILE
    assert f"Copied {len(TEXT)} characters. Nothing to paste?" in said
    assert str(file) in said
    assert [asked_for(sequence) for sequence in written if "]52" in sequence] == [TEXT]
    assert file.read_bytes().decode() == TEXT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_the_file_of_copies_is_named_once_and_is_gone_in_the_end(tmp_path: Path, written: list[str]) -> None:
    assert external_programs.copy_text(TEXT, tmp_path, written.append, known=True) == f"Copied {len(TEXT)} characters."
    assert (tmp_path / external_programs.FILE).exists()
    for _ in range(2):
        external_programs.forget_copied(tmp_path)
        assert not (tmp_path / external_programs.FILE).exists()


async def test_in_tmux_the_outer_terminal_is_asked_as_well(
    chat: Start, tmp_path: Path, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    async with chat("fast", ready=False) as c:
        await copied(c, written, monkeypatch, tmp_path)
    plain, wrapped = [sequence for sequence in written if "]52" in sequence]
    assert asked_for(plain) == TEXT
    inner = re.fullmatch(r"\x1bPtmux;(.*)\x1b\\", wrapped, re.DOTALL)
    assert inner
    assert asked_for(inner[1].replace("\x1b\x1b", "\x1b")) == TEXT


def test_a_link_in_its_place_is_not_followed_and_a_folder_there_is_said(tmp_path: Path, written: list[str]) -> None:
    precious, file = tmp_path / "precious.txt", tmp_path / external_programs.FILE
    precious.write_text("mine")
    file.symlink_to(precious)
    external_programs.copy_text(TEXT, tmp_path, written.append)
    assert (precious.read_text(), file.read_bytes().decode()) == ("mine", TEXT)
    file.unlink()
    file.mkdir()
    assert "can't be written" in external_programs.copy_text(TEXT, tmp_path, written.append)


def test_pbcopy_is_told_that_it_gets_utf_8_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "pbcopy"
    tool.write_text(f'#!/bin/sh\nprintf \'%s,%s\' "$LC_ALL" "$LC_CTYPE" > {tmp_path}/locale\ncat > {tmp_path}/copied\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LC_ALL", "C")
    for name in ("WAYLAND_DISPLAY", "SSH_CONNECTION", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    assert external_programs.copy_by_tool(TEXT) == "pbcopy"
    assert (tmp_path / "locale").read_text() == ",UTF-8"
    assert (tmp_path / "copied").read_bytes().decode() == TEXT


def test_lines_of_a_file_are_attached_by_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("".join(f"line {number}\n" for number in range(1, 11)))
    made = read_named("main.py:2-4", tmp_path)
    assert (made.name, made.text, made.kind) == ("main.py:2-4", "line 2\nline 3\nline 4", "code")
    assert read_named("main.py:9-99", tmp_path).name == "main.py:9-10"
    for wrong in ("main.py:4-2", "main.py:11-12"):
        with pytest.raises(AttachError, match="has lines 1 to 10"):
            read_named(wrong, tmp_path)
    (tmp_path / "odd:1-2").write_text("its own name")
    assert read_named("odd:1-2", tmp_path).text == "its own name"


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "a" * 300])
@pytest.mark.parametrize("lines", ["", ":1-2"])
def test_a_path_that_can_be_none_is_refused_with_lines_and_without(tmp_path: Path, name: str, lines: str) -> None:
    with pytest.raises(AttachError):
        read_named(name + lines, tmp_path)


@pytest.mark.parametrize("git", [True, False])
def test_a_folder_is_its_text_files_but_what_git_ignores(tmp_path: Path, git: bool) -> None:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "a.py").write_text("a = 1")
    (tmp_path / "src" / "deep" / "b.md").write_text("# b")
    (tmp_path / "src" / ".hidden").write_text("secret")
    (tmp_path / "src" / "picture.bin").write_bytes(b"\0\1")
    (tmp_path / "src" / "made.log").write_text("noise")
    (tmp_path / ".gitignore").write_text("*.log\n")
    if git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    made = read_named("src/.", tmp_path)
    expected = ["a.py", "deep/b.md"] if git else ["a.py", "deep/b.md", "made.log"]
    assert made.name == f"src/ ({len(expected)} files)"
    assert [each.name for each in apart(made.text).attachments] == expected


def test_an_empty_folder_and_one_that_is_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="no text files"):
        read_named(".", tmp_path)
    for number in range(MOST_IN_FOLDER + 1):
        (tmp_path / f"{number}.txt").write_text("x")
    with pytest.raises(AttachError, match="holds more than 200 text files"):
        read_named(str(tmp_path), tmp_path)
