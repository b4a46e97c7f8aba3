"""`tokamac cache`: what is stored is shown, removed and computed again; `ask` reads a long file once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.app.commands.conftest import Result, Run
from tests.app.commands.test_usage import HEAVY
from tests.tiny import make_tiny
from tokamac.engine import Engine, KVSpec, PromptCacheSpec
from tokamac.engine.prompt_cache.folder import DAILY_BYTES, Folder, child_name, default_root, root_name

pytestmark = pytest.mark.usefixtures("all_worth_storing")

ONE, OTHER = "ab" * 16, "cd" * 16
HOSTILE = "mine\x1b]0;owned\x07\nand\tmore\x9b2J"
LONG = "The river had risen in the night. " * 20  # a token a byte: 680


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context holds the long text."""
    return make_tiny(tmp_path_factory.mktemp("models") / "roomy", context=2048)


@pytest.fixture
def filled(roomy: Path) -> list[Path]:
    """The files that are stored after a long prompt."""
    if not (roomy / "stored").exists():
        compute(roomy, KVSpec(), roomy / "stored")
    shutil.copytree(roomy / "stored", default_root())
    return stored()


def compute(model: Path, kv: KVSpec, root: Path) -> None:
    with Engine.load(model, kv=kv, prompt_cache=PromptCacheSpec(folder=root)) as engine:
        list(engine.warm(engine.tokenizer.encode(LONG)))


def fill(model: str, label: str, *sizes: int) -> None:
    name = root_name(model, None)
    for number, length in enumerate(sizes):
        parent, name = name, child_name(name, [number])
        Folder(default_root()).write(model, label, parent, name, bytes(length))


def stored() -> list[Path]:
    return sorted(default_root().rglob("*.kv"))


def lines(done: Result) -> list[dict[str, Any]]:
    assert (done.status, done.err) == (0, "")
    return [json.loads(line) for line in done.out.splitlines()]


def failed(done: Result, status: int, said: str) -> bool:
    return done.status == status and said in done.err and done.err.count("\n") == 1


def test_show_where_nothing_is_stored(tokamac: Run, tmp_path: Path) -> None:
    shown = tokamac("cache").out
    assert str(tmp_path / "cache" / "prompts") in shown
    assert "nothing is stored yet" in shown
    (usage,) = lines(tokamac("cache", "--json"))
    assert (usage["bytes"], usage["written_today_bytes"], usage["models"]) == (0, 0, [])
    assert not (tmp_path / "cache").exists(), "to look makes nothing"
    assert "TOKAMAC_CACHE_DIR" in tokamac("cache", "--help").out


def test_show_for_people_and_programs(tokamac: Run) -> None:
    fill(ONE, "org/one", 3000, 2000)
    fill(OTHER, HOSTILE, 1500)
    folder, total, today, _, head, *rows = tokamac("cache", "show").out.splitlines()
    assert folder.split() == ["folder", str(default_root())]
    assert total.split()[:4] == ["stored", "6.50", "kB", "of"]
    assert today.split() == ["written", "today", "6.50", "kB", "of", "17.2", "GB"]
    assert head.split() == ["model", "files", "size", "last", "used"]
    shown = sorted(row.split()[:-1] for row in rows)
    assert shown == [["mine\ufffd", "and", "more\ufffd", "1", "1.50", "kB"], ["org/one", "2", "5.00", "kB"]]
    (usage,) = lines(tokamac("cache", "show", "--json"))
    assert " ".join(usage) == "folder bytes budget_bytes written_today_bytes daily_budget_bytes models"
    assert (usage["bytes"], usage["written_today_bytes"], usage["daily_budget_bytes"]) == (6500, 6500, DAILY_BYTES)
    assert usage["budget_bytes"] > 0
    assert all(" ".join(model) == "model fingerprint files bytes last_used" for model in usage["models"])
    by_name = {model["fingerprint"]: model for model in usage["models"]}
    assert (by_name[ONE]["model"], by_name[ONE]["files"], by_name[ONE]["bytes"]) == ("org/one", 2, 5000)
    assert by_name[OTHER]["model"] == HOSTILE  # JSON escapes it
    assert by_name[OTHER]["last_used"] == next((default_root() / OTHER).glob("*.kv")).stat().st_mtime


def test_clear_removes_all_and_says_how_much(tokamac: Run) -> None:
    fill(ONE, "one", 3000, 2000)
    assert tokamac("cache", "clear") == Result(0, "prompt cache cleared: 5.00 kB freed\n", "")
    assert stored() == []
    assert tokamac("cache", "clear") == Result(0, "nothing was stored\n", "")
    fill(OTHER, "other", 700)
    assert lines(tokamac("cache", "clear", "--json")) == [{"freed_bytes": 700}]
    assert lines(tokamac("cache", "clear", "--json")) == [{"freed_bytes": 0}]
    assert lines(tokamac("cache", "--json"))[0]["written_today_bytes"] == 5700  # written is written


@pytest.mark.parametrize("action", ["show", "clear", "check"])
def test_a_folder_that_can_not_be_read_is_one_line(tokamac: Run, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", __file__)
    done = tokamac("cache", action, "--json")
    assert failed(done, 1, "can't be read: Not a directory")
    assert "TOKAMAC_CACHE_DIR" in json.loads(done.out)["hint"]


def test_a_folder_that_can_not_be_cleared_is_one_line(tokamac: Run, tmp_path: Path) -> None:
    fill(ONE, "one", 100)
    (default_root() / ONE).rename(tmp_path / "elsewhere")
    (default_root() / ONE).symlink_to(tmp_path / "elsewhere")
    assert failed(tokamac("cache", "clear"), 1, "can't be cleared")


USAGE = [
    ("eat", "'eat'"), ("show guide", "show takes no MODEL"), ("clear --kv-bits 8", "no effect with clear"),
    ("--on-full stop", "no effect with show"), ("check --kv-bits 7", "--kv-bits"),
    ("check --kv-keep 8", "without --kv-window"), ("check guide guide", "PROMPT has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), USAGE)
def test_wrong_usage(tokamac: Run, arguments: str, said: str) -> None:
    assert failed(tokamac("cache", *arguments.split()), 2, said)


def test_show_and_clear_import_nothing_heavy() -> None:
    code = "import sys; from tokamac.app import cli; status = [cli.main(['cache', each]) for each in ('show', 'clear')]"
    code += f"; print({HEAVY} & set(sys.modules), status, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set() [0, 0]\n"


def test_the_same_long_file_asked_twice_is_read_once(tokamac: Run, roomy: Path, tmp_path: Path) -> None:
    (tmp_path / "long").write_text(LONG)
    asked = ("ask", "-f", tmp_path / "long", "-m", roomy, "--max-tokens", "4", "--temp", "0", "--json")
    first, second = lines(tokamac(*asked)), lines(tokamac(*asked))
    assert (first[0]["event"], second[0]["event"], first[0]["cached"]) == ("prefill", "prefill", 0)
    assert second[0]["cached"] == second[-1]["metrics"]["cached_tokens"] >= 256
    assert second[-1]["text"] == first[-1]["text"]
    (found,) = lines(tokamac("cache", "check", roomy, "--json"))
    assert (checks := found["checks"])
    assert all(" ".join(check) == "tokens difference top_same" for check in checks)
    assert all(check["tokens"] >= 256 and check["top_same"] for check in checks)
    assert found["largest_difference"] == max(check["difference"] for check in checks) <= 1e-3


def test_check_finds_what_the_same_settings_stored(tokamac: Run, roomy: Path, filled: list[Path]) -> None:
    check = ("cache", "check", "--kv-bits", "8,4", roomy)  # flags may stand before MODEL as well
    none = tokamac(*check)
    assert (none.status, none.err, none.out.count("\n"), stored()) == (0, "", 1, filled)
    assert "no complete prefix is stored" in none.out
    compute(roomy, KVSpec(8, 4), default_root())
    done = tokamac(*check)
    assert (done.status, done.err) == (0, "")
    assert all(said in done.out for said in ("tokens: difference", "the same top token", "\nlargest difference"))
    listed = tokamac("cache").out
    assert listed.count(str(roomy)) == 2
    assert "a row for each of its versions and KV settings" in listed


def test_a_flipped_byte_is_a_miss_and_never_breaks_the_check(tokamac: Run, roomy: Path, filled: list[Path]) -> None:
    for path in filled:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert lines(tokamac("cache", "check", roomy, "--json")) == [{"checks": [], "largest_difference": None}]
    assert stored() != filled


@pytest.mark.parametrize("value", [9.0, np.nan])
def test_what_no_rounding_explains_is_exit_1(tokamac: Run, roomy: Path, filled: list[Path], value: float) -> None:
    for path in filled:  # wrong numbers at its end, under a name that says they are right
        data = path.read_bytes()[:-8192] + np.full(2048, value, np.float32).tobytes()
        parent, name, _, suffix = path.name.split(".")
        path.rename(path.with_name(f"{parent}.{name}.{xxhash.xxh3_128_hexdigest(data)}.{suffix}")).write_bytes(data)
    done = tokamac("cache", "check", roomy, "--json")
    assert failed(done, 1, "tokamac cache clear")
    found = json.loads(done.out)
    assert found["checks"]
    assert (found["largest_difference"] is None) == np.isnan(value)


def test_ctrl_c_ends_the_check(tokamac: Run, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "check_cache", lambda _: (each for each in ()).throw(KeyboardInterrupt))
    assert tokamac("cache", "check", roomy) == Result(130, "", "")


def test_a_prompt_is_exported_and_imported_where_it_is_read_and_not_computed(
    tokamac: Run, roomy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text(LONG)
    file, flags = tmp_path / "prompt.kv", ("--kv-bits", "8", "--kv-group-size", "32")
    about = ("-m", roomy, "--system", "Be brief.", "-f", tmp_path / "long.txt")
    exported = tokamac("cache", "export", file, *about, *flags)
    assert (exported.status, exported.err) == (0, "")
    assert f"{file}: " in exported.out
    asked = ("ask", "Who slept?", *about, *flags, "--temp", "0", "--max-tokens", "8", "--json")
    cold = lines(tokamac(*asked, "--no-prompt-cache"))[-1]
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path / "elsewhere"))
    (imported,) = lines(tokamac("cache", "import", file, "-m", roomy, "--json"))
    assert imported["new_bytes"] > 0
    warm = lines(tokamac(*asked))[-1]
    assert warm["text"] == cold["text"]
    assert warm["metrics"]["cached_tokens"] == imported["tokens"] > len(LONG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("export", "name the file"),
        ("export x.kv", "nothing to compute"),
        ("import x.kv -f y", "--file has no effect"),
        ("import x.kv --kv-bits 8", "the file says which"),
        ("clear -m guide", "--model has no effect"),
    ],
)
def test_wrong_usage_of_files(tokamac: Run, arguments: str, said: str) -> None:
    assert failed(tokamac("cache", *arguments.split()), 2, said)


def test_a_file_that_is_none_is_said_before_a_model_is_loaded(tokamac: Run, tmp_path: Path) -> None:
    (tmp_path / "x.kv").write_bytes(b"nothing")
    assert failed(tokamac("cache", "import", tmp_path / "x.kv", "-m", "org/nowhere"), 1, "is not a computed prompt")
