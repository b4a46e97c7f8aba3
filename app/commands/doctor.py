"""``tokamac doctor``: installation and machine checks for a bug report."""

# Read-only; a failing check is a line with a fix and never stops the others. The last one runs some decode steps of the
# embedded model.

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import memory_size
from tokamac.engine.requirements import pip_install

from .. import settings
from ..parser import Parser
from ..text.sanitise import sanitise_line
from ..text.terminal import json_line, note
from ..text.units import UNKNOWN, bandwidth, milliseconds, rate, size

State = Literal["ok", "note", "broken"]

PACKAGES = ("mlx", "mlx-lm", "transformers", "huggingface-hub", "textual", "numpy")
LEAST_PYTHON = (3, 11)
LEAST_FREE = 2 * 10**9  # bytes free on a disk below which a download or the prompt cache will soon fail
LEAST_COLUMNS, LEAST_ROWS = 40, 12
REGISTRY = "https://pypi.org/pypi/tokamac/json"  # asked by --updates alone
REGISTRY_S, MOST_ANSWER = 5.0, 4 << 20  # how long, and how much of an answer is read
STEPS = 48  # tokens that the embedded model writes: some tenths of a second


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result. fix: what to do. section: its heading."""

    name: str
    value: str
    state: State = "ok"
    fix: str = ""
    section: str = ""


def parser() -> Parser:
    made = Parser(
        "doctor",
        "Check this installation and machine: versions, chip, memory, folders, terminal, settings, and a few steps of the "
        "embedded model. The output has no private paths: paste it into a bug report.",
        "  tokamac doctor\n  tokamac doctor --json > report.json\n  tokamac doctor --answers -m qwen3:4b\n"
        "  tokamac doctor --updates",
    )
    made.add_argument("--json", action="store_true", help="findings as JSON lines, the last one the result")
    kept = (
        "instead: whether a model still answers your last prompts as it did when this was first run; renew: from now on"
    )
    made.add_argument("--answers", nargs="?", const="compare", choices=("compare", "renew"), help=kept)
    made.add_argument(
        "--updates",
        action="store_true",
        help="instead: ask the Python registry for a newer version, and say how to get it",
    )
    made.add_argument("-m", "--model", metavar="MODEL", help="with --answers: another model than the settings' one")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    if options.answers is not None:
        from . import answers

        return answers.run(options, tuple((name, _version(name) or UNKNOWN) for name in answers.PACKAGES))
    if options.model is not None:
        parser.error("-m has no effect without --answers")
    if options.updates and options.answers is not None:
        parser.error("--updates and --answers are two questions: ask one")
    found: list[Finding] = []
    section = ""
    for each in findings({"Updates": updates} if options.updates else CHECKS):
        found.append(each)
        if options.json:
            json_line({"event": "finding", **asdict(each)})
            continue
        if each.section != section:
            print(f"\n{each.section}" if section else each.section)
            section = each.section
        mark = {"ok": " ", "note": "!", "broken": "✗"}[each.state]
        print(f"{mark} {each.name:<18}{each.value}")
        if each.fix:
            print(f"{'':20}→ {each.fix}")
        sys.stdout.flush()  # the last check takes a moment
    broken = [each for each in found if each.state == "broken"]
    if options.json:
        json_line({"event": "checked", "ok": not broken, "broken": [each.name for each in broken]})
    elif broken:
        note(f"\ntokamac: broken: {', '.join(each.name for each in broken)}. The arrows say what to do.")
    else:
        print("\nNothing is broken.")
    return 1 if broken else 0


def findings(checks: "Mapping[str, Callable[[], Iterator[Finding]]]") -> Iterator[Finding]:
    """Yield all findings; a failing check is itself a finding."""
    for section, check in checks.items():
        try:
            for each in check():
                yield replace(each, section=section, value=private(each.value), fix=private(each.fix))
        except Exception as error:  # whatever is wrong here is what the user wants to know
            known = error if isinstance(error, TokamacError) else None
            said = private(known.message if known else f"{type(error).__name__}: {error}")
            hint = private(known.hint if known else "Please report it, with the lines above.")
            yield Finding(section.lower(), said, "broken", hint, section)


def private(text: str, home: str | None = None) -> str:
    own = str(Path.home()) if home is None else home
    plain = sanitise_line(text)
    return plain if own in ("", "/") else plain.replace(own, "~")


def private_path(path: Path) -> str:
    """Return a path below home with ~; of any other only its last part."""
    return private(str(path)) if path.is_relative_to(Path.home()) else f"…/{path.name} (outside of ~)"


def _program() -> Iterator[Finding]:
    version = _version("tokamac")
    yield Finding("tokamac", version or "not installed: run from its source")
    enough = sys.version_info >= LEAST_PYTHON
    wanted = ".".join(map(str, LEAST_PYTHON))
    python = f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})"
    yield Finding(
        "Python", python, "ok" if enough else "broken", "" if enough else f"Install Python {wanted} or later."
    )
    for name in PACKAGES:
        known = _version(name)
        fix = "" if known else f"Install Tokamac again: {pip_install('--force-reinstall', name)}"
        yield Finding(name, known or "missing", "ok" if known else "broken", fix)
    from tokamac.engine.device import check_backends, installed_backends
    from tokamac.engine.kv.costs import MLX_VERSION

    if (mlx := _version("mlx")) and release(mlx)[:2] != release(MLX_VERSION)[:2]:
        fitted = f"Expected speeds and memory were fitted to MLX {MLX_VERSION}: take them as rough."
        yield Finding("MLX's version", f"{mlx}, which is another", "note", fitted)
    from tokamac.engine.requirements import unmet_here

    backends = installed_backends()
    named = ", ".join(f"{name} {_version(name)}" for name in backends) or "within mlx itself"
    try:
        check_backends(backends)
        yield Finding("MLX backend", named)
    except TokamacError as error:
        yield Finding("MLX backend", error.message, "broken", error.hint)
    if lacks := unmet_here():
        yield Finding("requirements", "not met", "broken", lacks)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def updates(url: str = REGISTRY) -> Iterator[Finding]:
    """Ask the registry, and say how this copy is updated."""
    own = _version("tokamac")
    how = update_command(Path(sys.prefix), _installed_from())
    yield Finding("tokamac", own or "run from its source")
    try:
        with urllib.request.urlopen(url, timeout=REGISTRY_S) as answer:  # one address of ours
            newest = str(json.loads(answer.read(MOST_ANSWER))["info"]["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = getattr(error, "code", None)
        why = "tokamac is not there" if said == 404 else f"no answer: {error!s:.80}"
        yield Finding("registry", why, "note", f"To update this copy all the same: {how}")
        return
    newer = bool(own) and release(newest) > release(own)
    yield Finding("newest", newest, "note" if newer else "ok", how if newer else "")


def release(version: str) -> tuple[int, ...]:
    """Parse ``0.3.0rc1`` as (0, 3, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return () if numbers is None else tuple(map(int, numbers[0].split(".")))


def _installed_from() -> str | None:
    """Return a URL; None: a registry."""
    try:  # as pip notes it: PEP 610
        noted = metadata.distribution("tokamac").read_text("direct_url.json")
        return None if noted is None else str(json.loads(noted)["url"])
    except metadata.PackageNotFoundError:
        return Path(__file__).parents[2].as_uri()
    except (ValueError, KeyError, TypeError):
        return None


def update_command(prefix: Path, source: str | None) -> str:
    """Return the command for an environment, and the URL that it was installed from."""
    parts = prefix.parts
    if "Cellar" in parts:
        return "brew upgrade tokamac"
    if source is not None and source.startswith("file:"):
        folder = Path(unquote(urlsplit(source).path))
        if (folder / ".git").exists():
            return f"git -C {shlex.quote(str(folder))} pull && make -C {shlex.quote(str(folder))} chat"
        return pip_install("--upgrade", str(folder))
    if ("uv", "tools") in pairwise(parts):
        return "uv tool upgrade tokamac"
    if ("pipx", "venvs") in pairwise(parts):
        return "pipx upgrade tokamac"
    return pip_install("--upgrade", "tokamac")


def _machine() -> Iterator[Finding]:
    mac = platform.mac_ver()[0]
    yield Finding("system", f"macOS {mac}" if mac else f"{platform.system()} {platform.release()}")
    from tokamac.engine.device import device_kind
    from tokamac.engine.perf import memory
    from tokamac.engine.perf.hardware import advice, detect

    chip = detect()
    yield Finding("chip", f"{chip.label}, computing on {device_kind()}, {os.cpu_count()} processors")
    if (said := advice()) is not None:
        yield Finding("accelerators", "not used", "note", said)
    yield from _memory_speed()
    total, budget, free = memory.machine_total(), memory.array_budget(), memory.available()
    given = settings.load(settings.default_path()).settings.memory_gb
    limit = size(budget) if given is None else f"{given:g} GB, from the settings"
    if mac:
        kept = settings.load(settings.default_path()).settings.wired
        fix = 'If the Mac panics: wired = "off" in the settings (tokamac help memory).' if kept == "on" else ""
        yield Finding("wired", kept, "note" if fix else "ok", fix)
    has = UNKNOWN if total is None else memory_size(total)
    yield Finding("memory", f"{has}, models may use {limit}, {size(free)} free now")


def _memory_speed() -> Iterator[Finding]:
    from tokamac.engine.perf.what_if import here

    chip = here().chip
    told = f" ({chip.condition})" if chip.condition else f" ({chip.source})"
    yield Finding("memory bandwidth", f"{bandwidth(chip.bandwidth_gbs)}{told}")


def _folders() -> Iterator[Finding]:
    from tokamac.engine.perf import hardware
    from tokamac.engine.prompt_cache.folder import default_root

    from ..models.local import hub_cache
    from ..store.database import default_path

    for name, folder in {
        "settings": settings.default_path().parent,
        "chats": default_path().parent,
        "prompt cache": default_root(),
        "measurements": hardware.store_file("bandwidth.json").parent,
        "Hugging Face": hub_cache(),
    }.items():
        yield folder_finding(name, folder)


def folder_finding(name: str, folder: Path) -> Finding:
    """Check that a folder is readable and writable, or can be made; report free space."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    usable = there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)
    where = f"{private_path(folder)}{'' if folder.exists() else ' (made when needed)'}"
    if not usable:
        return Finding(
            name, f"{where}: can't be written", "broken", f"Check the owner and permissions of {private_path(there)}."
        )
    free = shutil.disk_usage(there).free
    mode = f", mode {there.stat().st_mode & 0o777:o}" if folder.exists() else ""
    if free < LEAST_FREE:
        return Finding(name, f"{where}, {size(free)} free{mode}", "note", "Free some space: downloads will fail.")
    return Finding(name, f"{where}, {size(free)} free{mode}")


def _terminal() -> Iterator[Finding]:
    yield from terminal_findings(os.environ, shutil.get_terminal_size(), sys.stdout.isatty())


def terminal_findings(environment: Mapping[str, str], found: os.terminal_size, is_terminal: bool) -> Iterator[Finding]:
    term = environment.get("TERM", "")
    program = environment.get("TERM_PROGRAM") or ("tmux" if environment.get("TMUX") else "")
    simple = term in ("", "dumb")
    fix = "The chat uses plain lines here (--plain)." if simple else ""
    yield Finding("TERM", f"{term or 'not set'}{f', {program}' if program else ''}", "note" if simple else "ok", fix)
    yield Finding("colours", _colours(environment))
    if not is_terminal:
        yield Finding("size", "stdout is not a terminal")
        return
    small = found.columns < LEAST_COLUMNS or found.lines < LEAST_ROWS
    fix = f"The chat needs about {LEAST_COLUMNS} columns and {LEAST_ROWS} rows." if small else ""
    yield Finding("size", f"{found.columns} × {found.lines}", "note" if small else "ok", fix)
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    fix = "" if encoding == "utf8" else "Set LANG to a UTF-8 locale, such as en_US.UTF-8."
    yield Finding("encoding", sys.stdout.encoding or UNKNOWN, "note" if fix else "ok", fix)


def _colours(environment: Mapping[str, str]) -> str:
    term, wide = environment.get("TERM", ""), environment.get("COLORTERM", "")
    if environment.get("NO_COLOR"):
        return "none (NO_COLOR is set)"
    if wide in ("truecolor", "24bit"):
        return f"16.7 million (COLORTERM={wide})"
    return "256" if "256color" in term else "none" if term in ("", "dumb") else "16"


def _models() -> Iterator[Finding]:
    from ..models.local import hub_cache, models_on_disk

    disk = models_on_disk(hub_cache(), ())
    broken = sum(not each.whole for each in disk.models)
    held = sum(each.nbytes for each in disk.models if each.home == "cache")
    value = f"{len(disk.models) - broken} complete, {size(held)} in the Hugging Face cache"
    if broken:
        yield Finding("models", f"{value}, {broken} incomplete", "note", "tokamac models list shows which.")
    else:
        yield Finding("models", value)
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
        if os.environ.get(name):
            yield Finding(name, "set")
    yield Finding("HF_TOKEN", "set" if os.environ.get("HF_TOKEN") else "not set")


def _settings() -> Iterator[Finding]:
    loaded = settings.load(settings.default_path())
    yield Finding("settings", "fine" if not loaded.warnings else f"{len(loaded.warnings)} problems")
    for warning in loaded.warnings:
        yield Finding("problem", warning, "note", "tokamac help settings shows what each may be.")
    theme = loaded.settings.theme or "the default"
    yield Finding("theme", theme)


def _steps() -> Iterator[Finding]:
    from tokamac.engine import Engine, Finished, Message, Sampling

    with connections() as hosts, Engine.load("guide", prompt_cache=None) as engine:
        prompt = [Message("user", "What is TTFT?")]
        *_, last = engine.generate(prompt, Sampling(temperature=0.0, max_tokens=STEPS))
        assert isinstance(last, Finished)
        limits, metrics = engine.limits(len(prompt[0].content)), last.metrics
    gap = None if metrics.itl_ms is None else metrics.itl_ms.p50
    yield Finding("decode step", f"{milliseconds(gap)} with guide")
    yield Finding("expected", rate(limits.expected_tps))
    yield Finding("ceiling", rate(metrics.ceiling_tps))
    if hosts:
        yield Finding("network", f"the answer asked for {', '.join(hosts)}", "broken", "Please report it.")
    else:
        yield Finding("network", "not used: the model was loaded and answered, and no socket left this machine")
    if not last.text.strip():
        yield Finding(
            "answer",
            "empty",
            "broken",
            f"MLX gives wrong results here. Reinstall it: {pip_install('--force-reinstall', 'mlx')}",
        )


# Python's audit hooks hear each of these before it happens; none can be removed, so there is one.
_CONNECTING = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
_heard: list[list[str]] = []


@contextmanager
def connections() -> Iterator[list[str]]:
    """Yield a list that gets each host beyond this machine that Python code of this process connects to meanwhile."""
    _listen()
    hosts: list[str] = []
    _heard.append(hosts)
    try:
        yield hosts
    finally:
        _heard.remove(hosts)


@cache
def _listen() -> None:
    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event in _CONNECTING and _heard:
            address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
            host = address[0] if isinstance(address, tuple) else address if event == "socket.getaddrinfo" else None
            if host is not None and not _is_here(str(host)):
                for hosts in _heard:
                    hosts.append(str(host))

    sys.addaudithook(hear)


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Program": _program,
    "Settings": _settings,  # before others read them: the first to find the file damaged moves it aside
    "Machine": _machine,
    "Folders": _folders,
    "Terminal": _terminal,
    "Models": _models,
    "Engine": _steps,
}
