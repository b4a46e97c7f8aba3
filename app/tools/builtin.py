"""The built-in tools: files in allowed folders, a calculator, a clock."""

import ast
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tokamac.engine.files import NotRegularError, expanded, open_regular
from tokamac.engine.options import ToolSpec

from .calls import LONGEST_RESULT, ToolError

# Paths are resolved before the check, so symlinks don't lead out. Dotfiles and usual secrets below a folder are
# refused, unless the user allows such a folder itself.


LARGEST_FILE = 8 << 20  # bytes of a file that is read
LARGEST_SEARCHED = 1 << 20
MOST_NAMES = 400
MOST_MATCHES = 100
MOST_FILES = 20_000  # names that a search looks at
SEARCH_S = 5.0
LINE_S = 0.5  # a regular expression may take for ever on one line
LONGEST_LINE = 300
SECRET_NAMES = frozenset(
    {"id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "credentials", "credentials.json", "secrets.json"}
)
SECRET_ENDS = (".pem", ".key", ".p12", ".pfx", ".keychain", ".keychain-db", ".kdbx")


class AllowedFolders:
    def __init__(self, folders: Sequence[Path]) -> None:
        self.roots = tuple(dict.fromkeys(_resolved(folders)))

    def resolve(self, given: str, *, new: bool = False) -> Path:
        """Resolve a model's path. new: it need not exist. Raises ToolError if not allowed or missing."""
        if "\0" in given:
            raise ToolError("a path has no NUL in it")
        try:
            path = (self.roots[0] / expanded(given or ".")).resolve()
            root = self.root_of(path)
            if root is None:
                raise ToolError(
                    f"{given:.200} is outside of the folders that the user allowed: {', '.join(map(str, self.roots))}",
                    "Ask the user: folders under [tools] in the settings allows more.",
                )
            if why := hidden(path.relative_to(root)):
                raise ToolError(f"{given:.200} is not for tools: {why}")
            if not new and not path.exists():
                raise ToolError(f"there is no {given:.200}")
        except (OSError, RuntimeError, ValueError) as error:
            raise ToolError(f"{given:.200} can't be read: {error}") from error
        return path

    def name(self, path: Path) -> str:
        root = self.root_of(path)
        return str(path) if root is None or root != self.roots[0] else str(path.relative_to(root))

    def root_of(self, path: Path) -> Path | None:
        return max(
            (root for root in self.roots if path.is_relative_to(root)), key=lambda root: len(root.parts), default=None
        )


def _resolved(folders: Sequence[Path]) -> Iterator[Path]:
    """Yield resolved folders; one that can't be resolved allows nothing."""
    for folder in folders:
        with suppress(OSError, RuntimeError, ValueError):  # links in a circle, a name with a NUL
            yield expanded(folder).resolve()


def hidden(path: Path) -> str:
    if any(part.startswith(".") for part in path.parts):
        return "names that begin with a dot are hidden from tools"
    if path.name.lower() in SECRET_NAMES or path.name.lower().endswith(SECRET_ENDS):
        return "such files usually hold secrets"
    return ""


def text_of(path: Path, most: int) -> str:
    """Return a file's text. Raises ToolError for large or binary files."""
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except (NotRegularError, OSError) as error:
        raise ToolError(f"{path.name} can't be read: {error.strerror or error}") from error
    if len(data) > most:
        raise ToolError(f"{path.name} has more than {most >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ToolError(f"{path.name} is not UTF-8 text") from None
    if "\0" in text:
        raise ToolError(f"{path.name} is a binary file")
    return text


class ReadFile:
    spec = ToolSpec(
        "read_file",
        "Read a text file of the user's. Long files are cut; from_line and lines choose a part.",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The file's path, relative to the user's folder."},
                "from_line": {"type": "integer", "description": "The first line to read, from 1."},
                "lines": {"type": "integer", "description": "How many lines to read."},
            },
            "required": ["path"],
        },
    )

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders

    def run(self, arguments: Mapping[str, Any]) -> str:
        path = self._folders.resolve(arguments["path"])
        if path.is_dir():
            raise ToolError(f"{arguments['path']:.200} is a folder; list_folder lists it")
        lines = text_of(path, LARGEST_FILE).splitlines()
        first, many = arguments.get("from_line", 1), arguments.get("lines")
        if first < 1 or (many is not None and many < 1):
            raise ToolError("from_line and lines are 1 or more")
        if first > max(1, len(lines)):
            raise ToolError(f"the file has {len(lines)} lines")
        last = len(lines) if many is None else min(len(lines), first - 1 + many)
        text = "\n".join(lines[first - 1 : last])
        if len(text) > LONGEST_RESULT - 200:
            text = text[: LONGEST_RESULT - 200]
            last = first + text.count("\n")
        whole = first == 1 and last == len(lines)
        return text if whole else f"{text}\n[lines {first} to {last} of {len(lines)}]"


class ListFolder:
    spec = ToolSpec(
        "list_folder",
        "List the names in a folder of the user's; folders end with a slash.",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The folder's path; nothing is the user's folder."}
            },
        },
    )

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders

    def run(self, arguments: Mapping[str, Any]) -> str:
        path = self._folders.resolve(arguments.get("path", "."))
        if not path.is_dir():
            raise ToolError(f"{arguments.get('path')!r:.200} is not a folder")
        try:
            found = sorted(path.iterdir(), key=lambda each: (not each.is_dir(), each.name.lower()))
        except OSError as error:
            raise ToolError(f"the folder can't be read: {error.strerror}") from error
        shown = [each for each in found if not hidden(Path(each.name))]
        lines = [_named(each) for each in shown[:MOST_NAMES]]
        if len(shown) > MOST_NAMES:
            lines.append(f"[… {len(shown) - MOST_NAMES} more]")
        if len(found) > len(shown):
            lines.append(f"[{len(found) - len(shown)} hidden]")
        return "\n".join(lines) or "(an empty folder)"


def _named(path: Path) -> str:
    try:
        return f"{path.name}/" if path.is_dir() else f"{path.name}  {path.stat().st_size:,} bytes"
    except OSError:
        return path.name


class _Pace:
    """Bounds a search in time and number, matches or not. note: why it was cut short."""

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + SEARCH_S
        self._seen = 0
        self.note = ""

    def goes_on(self, *, names: int = 0) -> bool:
        self._seen += names
        if self._seen > MOST_FILES or time.monotonic() > self._ends_s:
            self.note = "[stopped early: search in a smaller folder]"
        return not self.note


class SearchFiles:
    spec = ToolSpec(
        "search_files",
        "Find the lines of the user's text files that hold a text, or match a regular expression. .gitignore is heeded.",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "What to look for."},
                "path": {
                    "type": "string",
                    "description": "The folder or file to search; nothing is the user's folder.",
                },
                "regex": {"type": "boolean", "description": "Whether the text is a regular expression."},
                "files": {"type": "string", "description": "A pattern of file names, such as *.py."},
            },
            "required": ["text"],
        },
    )

    def __init__(self, folders: AllowedFolders) -> None:
        self._folders = folders

    def run(self, arguments: Mapping[str, Any]) -> str:
        import regex

        wanted = arguments["text"]
        if not wanted:
            raise ToolError("there is nothing to look for")
        try:
            pattern = regex.compile(wanted if arguments.get("regex") else regex.escape(wanted), regex.IGNORECASE)
        except regex.error as error:
            raise ToolError(f"that is no regular expression: {error}") from None
        path = self._folders.resolve(arguments.get("path", "."))
        pace = _Pace()
        found: list[str] = []
        try:
            for file, at, line in self._lines(path, arguments.get("files") or "*", pace):
                if pattern.search(line, timeout=LINE_S, concurrent=True):
                    found.append(f"{self._folders.name(file)}:{at}: {line.strip()[:LONGEST_LINE]}")
                if len(found) >= MOST_MATCHES or not pace.goes_on():
                    break
        except TimeoutError:
            raise ToolError("the regular expression takes too long: use a simpler one") from None
        note = f"[the first {MOST_MATCHES} lines; there may be more]" if len(found) >= MOST_MATCHES else pace.note
        return "\n".join([*(found or ["no line matches"]), *([note] if note else [])])

    def _lines(self, path: Path, pattern: str, pace: "_Pace") -> Iterator[tuple[Path, int, str]]:
        for file in self._files(path, pattern, pace):
            try:
                lines = text_of(file, LARGEST_SEARCHED).splitlines()
            except ToolError:
                continue
            yield from ((file, at, line) for at, line in enumerate(lines, 1))

    def _files(self, path: Path, pattern: str, pace: "_Pace") -> Iterator[Path]:
        if path.is_file():
            yield path
            return
        root = next(root for root in self._folders.roots if path.is_relative_to(root))
        inner = path.relative_to(root)
        above = [root / each for each in dict.fromkeys((*reversed(inner.parents), inner))]
        rules = [(folder, found) for folder in above if (found := _rules(folder)) is not None]
        yield from self._walk(path, pattern, rules, pace)

    def _walk(self, folder: Path, pattern: str, rules: list[tuple[Path, Any]], pace: "_Pace") -> Iterator[Path]:
        try:
            names = sorted(folder.iterdir(), key=lambda each: (each.is_dir(), each.name))
        except OSError:
            return
        for each in names:
            if not pace.goes_on(names=1):
                return
            if hidden(Path(each.name)) or each.is_symlink() or _ignored(each, rules):
                continue
            if each.is_dir():
                own = _rules(each)
                yield from self._walk(each, pattern, [*rules, (each, own)] if own is not None else rules, pace)
            elif Path(each.name).match(pattern):
                yield each


def _rules(folder: Path) -> Any:
    import pathspec

    try:
        text = text_of(folder / ".gitignore", LARGEST_SEARCHED)
        return pathspec.GitIgnoreSpec.from_lines(text.splitlines())
    except (ToolError, ValueError):
        return None


def _ignored(path: Path, rules: list[tuple[Path, Any]]) -> bool:
    tail = "/" if path.is_dir() else ""
    return any(spec.match_file(f"{path.relative_to(folder)}{tail}") for folder, spec in rules)


# The calculator walks the syntax tree of an expression: nothing of it is run as Python.
LONGEST_EXPRESSION = 1_000


MOST_NODES = 200


MOST_BITS = 4_096  # of a whole number: some 1,200 digits


MOST_FACTORIAL = 400


Number = int | float


_TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_ONE: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in (
        "sqrt", "exp", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "floor", "ceil", "gcd", "hypot",
        "degrees", "radians", "isqrt",
    )},
    "log": math.log, "abs": abs, "round": round, "min": min, "max": max, "sum": lambda *values: sum(values),
}  # fmt: skip


class Calculate:
    spec = ToolSpec(
        "calculate",
        "Compute an arithmetic expression exactly, such as (3 + 4) * sqrt(2) or 2 ** 100 % 97.",
        {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": f"Numbers, + - * / // % **, brackets, and {', '.join(_FUNCTIONS)}, factorial, pi, e, tau.",
                }
            },
            "required": ["expression"],
        },
    )

    def run(self, arguments: Mapping[str, Any]) -> str:
        return shown(evaluate(arguments["expression"]))


def evaluate(expression: str) -> Number:
    """Evaluate an arithmetic expression. Raises ToolError if invalid or too large."""
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression has at most {LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(text, mode="eval")
        if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
            raise ToolError("the expression is too long")
        return _value(tree.body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("that divides by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r:.80} is no arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"that has no value: {error}") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _bounded(_TWO[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _ONE:
            return _bounded(_ONE[type(op)](_value(operand)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id="factorial"), args=[only], keywords=[]):
            return _factorial(_value(only))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
    raise ToolError(f"{ast.unparse(node):.80} is not part of arithmetic here")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent >= 0 and base.bit_length() * exponent > MOST_BITS:
            raise ToolError("that number is too large")
        return _bounded(base**exponent)
    found = base**exponent
    if isinstance(found, complex):
        raise ToolError("that is no real number")
    return _bounded(found)


def _factorial(value: Number) -> Number:
    if not isinstance(value, int) or not 0 <= value <= MOST_FACTORIAL:
        raise ToolError(f"factorials are computed of whole numbers up to {MOST_FACTORIAL}")
    return math.factorial(value)


def _bounded(value: Any) -> Number:
    if not isinstance(value, int | float):
        raise ToolError("that is no real number")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ToolError("that number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("that number is too large")
    return value


def shown(value: Number) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else repr(value)


class Clock:
    spec = ToolSpec("clock", "Tell the date, the weekday and the time where the user is.")

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now().astimezone()) -> None:
        self._now = now

    def run(self, arguments: Mapping[str, Any]) -> str:
        del arguments  # there are none
        return self._now().strftime("%A, %Y-%m-%d %H:%M:%S %z (%Z)")
