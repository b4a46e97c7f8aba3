"""What goes with a prompt: how it enters the message, which files are taken, and how they are found by a part of their path."""

import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamac.app.chat import attachments
from tokamac.app.chat.attachments import AttachError, Draft, apart, attachment, is_long, joined, pasted, read_file
from tokamac.app.sanitise import sanitise
from tokamac.app.store.values import Attachment
from tokamac.app.tui.widgets.prompt_input import Finder, PartialPath, path_at, ranked

NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), min_size=1)
TEXTS = st.text() | st.text("`\n ab")


@given(st.lists(st.tuples(NAMES, TEXTS)), st.lists(TEXTS), st.text())
def test_a_message_comes_apart_into_what_it_was_made_of(
    files: list[tuple[str, str]], pastes: list[str], words: str
) -> None:
    attachments = [attachment(f"{name}.md", text) for name, text in files]
    for paste in pastes:
        attachments.append(pasted(paste, attachments))
    draft = Draft(f"> {words}", tuple(attachments))  # no file begins so
    assert apart(draft.whole) == draft


def test_an_attachment_stands_in_a_block_that_it_cannot_end() -> None:
    draft = Draft("Why?", (Attachment("a.py", "x = '```'\n````\ny = 1", "code"),))
    assert draft.whole == "File a.py:\n`````\nx = '```'\n````\ny = 1\n`````\n\nWhy?"


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
    ("text", "long"),
    [("x" * 2_000, False), ("x" * 2_001, True), ("x\n" * 29, False), ("x\n" * 30, True)],
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
        ("none.txt", "There is no file none.txt"),
        ("folder", "folder is a folder"),
        ("picture.png", "picture.png is a binary file"),
        ("latin.txt", "latin.txt is no UTF-8 text"),
        ("pipe", "pipe is not a regular file"),
        ("socket", "socket is not a regular file"),
        ("large.txt", "large.txt has 4.0 MB; the limit is 4"),
        ("a\0b", "a�b can't be read"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x can't be read"),
        ("/dev/zero", "/dev/zero is not a regular file"),
    ],
)
def test_what_is_no_text_is_refused_by_name_and_at_once(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
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
        ("@", PartialPath(0, "")),
        ("see @app/tu", PartialPath(4, "app/tu")),
        ("(@x", PartialPath(1, "x")),
        ("somebody@home", None),
        ("@done and more", None),
        ("", None),
    ],
)
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
