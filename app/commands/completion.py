"""``tokamac completion SHELL``: completion script for bash, zsh or fish."""

# The script asks this program (``tokamac completion words -- WORDS``), so it matches the parsers and the models on disk.
# Answer lines are word, tab, meaning; ``:files`` means the shell's path completion. Errors complete nothing.

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from tokamac.engine.options import KV_BITS

from ..cli import COMMANDS, HELP, VERSION
from ..parser import ActionParser, Parser
from ..text.sanitise import sanitise_line

WORDS = "words"
FILES = ":files"  # the line of an answer that stands for paths

SCRIPTS = {
    "bash": r"""_tokamac() {
    local line word current="${COMP_WORDS[COMP_CWORD]}"
    local -a written=("${COMP_WORDS[@]:1:COMP_CWORD}")
    COMPREPLY=()
    while IFS= read -r line; do
        word="${line%%$'\t'*}"
        if [[ $word == :files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$current")
        elif [[ -n $word ]]; then
            COMPREPLY+=("$(printf '%q' "$word")")
        fi
    done < <(tokamac completion words -- "${written[@]//\\/}" 2>/dev/null)
}
complete -F _tokamac tokamac""",
    "zsh": r"""#compdef tokamac
_tokamac() {
    local line files=""
    local -a answer found shown
    answer=("${(@f)$(tokamac completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${answer[@]}"; do
        if [[ $line == :files ]]; then
            files=1
        elif [[ -n $line ]]; then
            found+=("${line%%$'\t'*}")
            shown+=("${line/$'\t'/  -- }")
        fi
    done
    (( $#found )) && compadd -l -d shown -a found
    [[ -n $files ]] && _files
    return 0
}
if ! (( $+functions[compdef] )); then
    autoload -Uz compinit && compinit
fi
compdef _tokamac tokamac""",
    "fish": r"""function __tokamac_complete
    set -l current (commandline -ct)
    set -l typed (commandline -opc)
    for line in (tokamac completion words -- $typed[2..-1] "$current" 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c tokamac -f -a '(__tokamac_complete)'""",
}
INSTALL = {
    "bash": 'in ~/.bashrc:  eval "$(tokamac completion bash)"',
    "zsh": 'in ~/.zshrc:   eval "$(tokamac completion zsh)"',
    "fish": "once:          tokamac completion fish > ~/.config/fish/completions/tokamac.fish",
}


class CompletionParser(Parser):
    """Passes on the words after ``words`` verbatim, flags included."""

    def parse_args(  # type: ignore[override]  # the cli asks for no other Namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given = list(args or ())
        if given[:2] == [WORDS, "--"]:
            return argparse.Namespace(shell=WORDS, words=given[2:] or [""])
        return super().parse_args(args, namespace)


def parser() -> Parser:
    lines = "\n".join(f"  {line}" for line in INSTALL.values())
    made = CompletionParser(
        "completion", "Print a script that completes commands, flags, models and topics in your shell.", lines
    )
    made.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:  # noqa: ARG001  # every command's form
    if options.shell == WORDS:
        for each in completions(options.words):
            print(each.line)
    else:
        print(SCRIPTS[options.shell])
    return 0


@dataclass(frozen=True, slots=True)
class Completion:
    word: str
    meaning: str = ""

    @property
    def line(self) -> str:
        word, meaning = sanitise_line(self.word), sanitise_line(self.meaning)
        return f"{word}\t{meaning}" if meaning else word


def completions(words: Sequence[str]) -> list[Completion]:
    """Return completions of the last word; the program's name is excluded."""
    *before, current = _joined(words)
    found = _after(before, current)
    flag, equals, value = current.partition("=")
    if equals and flag.startswith("--"):
        # zsh and fish replace the whole of --flag=value; bash breaks words at the sign, and its words hold it apart.
        lead = "" if "=" in words else f"{flag}="
        known = [
            Completion(lead + each.word, each.meaning) for each in _after([*before, flag], value) if each.word != FILES
        ]
        return [each for each in known if each.word.startswith(lead + value)]
    return [each for each in found if each.word == FILES or each.word.startswith(current)]


def _joined(words: Sequence[str]) -> list[str]:
    """Rejoin ``--flag``, ``=``, ``value``, which bash splits."""
    made: list[str] = []
    joins = False
    for word in words or [""]:
        if made and (joins or (word == "=" and made[-1].startswith("--"))):
            made[-1] += word
            joins = word == "="
        else:
            made.append(word)
    return made


def _after(before: Sequence[str], current: str) -> list[Completion]:
    if not before:
        return [*_commands(), *_arguments("chat", [], current)] if current.startswith("-") else _commands()
    first, *rest = before
    if first in HELP:
        return _commands(topics=True) if not rest else []
    if first in COMMANDS:
        return _arguments(first, rest, current)
    return _arguments("chat", before, current) if first.startswith("-") and first not in VERSION else []


def _commands(*, topics: bool = False) -> list[Completion]:
    found = [Completion(name, summary) for name, summary in COMMANDS.items()]
    if topics:
        from .. import help as texts

        return [
            *found,
            *(Completion(name, summary) for name, summary in texts.topics().items() if name not in COMMANDS),
        ]
    return [
        *found,
        Completion("help", "what a command does, or a topic"),
        Completion("--help"),
        Completion("--version"),
    ]


def _arguments(command: str, before: Sequence[str], current: str) -> list[Completion]:
    made: Parser = import_module(f"tokamac.app.commands.{command}").parser()
    flags = {name: action for action in made._actions for name in action.option_strings}
    if "--" in before:
        return _positional(made, [word for word in before if word != "--"], flags)
    waiting = flags.get(before[-1]) if before else None
    if waiting is not None and waiting.nargs != 0 and (waiting.nargs != "?" or not current.startswith("-")):
        return _values(made, waiting)
    if current.startswith("-"):
        used = set(before)
        open_ = (
            action
            for action in flags.values()
            if not used & set(action.option_strings) or isinstance(action, argparse._AppendAction)
        )
        action_named = next((word for word in before if isinstance(made, ActionParser) and word in made.actions), None)
        unique = dict.fromkeys(action for action in open_ if _fits(made, action_named, action))
        return [Completion(name, _meaning(action)) for action in unique for name in action.option_strings]
    return _positional(made, before, flags)


def _fits(made: Parser, named: str | None, action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and (
        named is None or not isinstance(made, ActionParser) or made.takes(named, action.dest)
    )


def _positional(made: Parser, before: Sequence[str], flags: dict[str, argparse.Action]) -> list[Completion]:
    filled, skip = 0, False
    for word in before:
        takes = flags.get(word)
        if skip:
            skip = False
        elif takes is not None:
            skip = takes.nargs is None
        elif not word.startswith("-") or word == "-":
            filled += 1
    open_ = [action for action in made._actions if not action.option_strings]
    if isinstance(made, ActionParser) and filled:
        named = next((word for word in before if word in made.actions), None)
        open_ = [
            each for each in open_ if each.dest == "action" or (named is not None and made.takes(named, each.dest))
        ]
    if filled < len(open_):
        return _values(made, open_[filled])
    return _values(made, open_[-1]) if open_ and open_[-1].nargs == "*" else []


def _values(made: Parser, action: argparse.Action) -> list[Completion]:
    if action.choices is not None:
        return [Completion(str(choice)) for choice in action.choices]
    if isinstance(made, ActionParser) and action.dest == "action":
        return [Completion(name, does) for name, does in made.actions.items()]
    given = VALUES.get(action.dest)
    if given is not None:
        return given()
    kinds = set(re.split(r"[^A-Z]+", str(action.metavar or "")))
    found = (
        _models()
        if kinds & {"MODEL", "SOURCE", "A", "B"} or (action.dest, made.prog) == ("words", "tokamac models")
        else []
    )
    return [*found, Completion(FILES)] if kinds & {"FILE", "DIR", "MODEL", "SOURCE", "SVG", "A", "B"} else found


def _models() -> list[Completion]:
    from ..models.local import FOLDERS_FILE, Folders, hub_cache, names_on_disk
    from ..settings import default_path

    folders = Folders(default_path().parent / FOLDERS_FILE).all()
    return [Completion(name) for name in dict.fromkeys([*names_on_disk(hub_cache()), *folders])]


def _chips() -> list[Completion]:
    from tokamac.engine.perf.hardware import known_chips, plain_name

    return [Completion(name) for name in dict.fromkeys(plain_name(row["chip"]) for row in known_chips())]


def _chats() -> list[Completion]:
    from ..store.database import default_path
    from ..store.store import Store

    if not default_path().exists():
        return []
    store = Store.open_to_read(default_path())
    try:
        return [Completion(chat.id, chat.title) for chat in store.chats(limit=50)]
    finally:
        store.close()


def _adapters() -> list[Completion]:
    from ..settings import default_path, load

    return [Completion(name) for name in dict.fromkeys(load(default_path()).settings.adapters.values())]


def _profiles() -> list[Completion]:
    from ..chat.settings_form import summary
    from ..settings import default_path, load

    return [Completion(name, summary(profile)) for name, profile in load(default_path()).settings.profiles.items()]


# Values by the name of an argument, where the parser takes more than a list of choices.
VALUES: dict[str, Callable[[], list[Completion]]] = {
    "chip": _chips,
    "chat": _chats,
    "profile": _profiles,
    "target": lambda: [*_chats(), Completion(FILES)],
    "adapter": lambda: [*_adapters(), Completion(FILES)],
    "draft": lambda: [*_models(), Completion(FILES)],
    "kv_bits": lambda: [Completion(str(bits)) for bits in KV_BITS],
    "kv_keep": lambda: [Completion("system", "the system prompt")],
    "parallel": lambda: [Completion(str(width)) for width in (1, 2, 4, 8)],
    "resume": lambda: [Completion(FILES)],
}


def _meaning(action: argparse.Action) -> str:
    text = " ".join((action.help or "").replace("%%", "%").split())
    return re.split(r"[;:(]| \(", text)[0].strip()[:60]
