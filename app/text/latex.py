"""LaTeX formulas as Unicode text, where readable."""

# ``E = mc^2`` becomes ``E = mc²``, a fraction ``a/b``, a matrix bracketed rows. Anything else (unknown command,
# unbalanced braces) is None and shown as source: half a formula would be wrong. Length and depth are limited.

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple
from unicodedata import normalize

from rich.cells import cell_len

LONGEST = 4_000  # characters of a formula that is converted
DEEPEST = 24  # groups within groups that are followed

# As TeX's classes of atoms, which decide where there is space. frac: a fraction, which stands apart from a neighbour.
Kind = Literal["ord", "frac", "bin", "rel", "op", "punct", "open", "close", "space"]


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LETTERS = _pairs(
    """alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν
    xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω
    Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
    infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ wp ℘ emptyset ∅ varnothing ∅ forall ∀ exists ∃ nexists ∄
    neg ¬ lnot ¬ top ⊤ bot ⊥ angle ∠ triangle △ square □ Box □ blacksquare ■ checkmark ✓ degree ° prime ′ dagger † ddagger ‡
    dots … ldots … cdots ⋯ dotsc … dotsb ⋯ vdots ⋮ ddots ⋱ therefore ∴ because ∵ qed ∎ imath ı jmath ȷ
    backslash \\ # # $ $ % % & & _ _ cdot · star ⋆ ast ∗ circ ∘ bullet • S § P ¶ pounds £ euro € copyright © AA Å
    clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠ vert | Vert ‖ | ‖ / /"""
)
_BINARY = _pairs(
    """pm ± mp ∓ times × div ÷ cap ∩ cup ∪ setminus ∖ smallsetminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ oplus ⊕ ominus ⊖ otimes ⊗
    oslash ⊘ odot ⊙ uplus ⊎ sqcap ⊓ sqcup ⊔ bmod mod diamond ⋄ bigtriangleup △ amalg ⨿ ltimes ⋉ rtimes ⋊ boxplus ⊞ boxtimes ⊠"""
)
_RELATIONS = _pairs(
    """leq ≤ le ≤ leqslant ≤ geq ≥ ge ≥ geqslant ≥ neq ≠ ne ≠ approx ≈ sim ∼ simeq ≃ cong ≅ equiv ≡ propto ∝ ll ≪ gg ≫ lt < gt >
    in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ sqsubseteq ⊑ prec ≺ succ ≻ preceq ≼ succeq ≽
    to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺
    longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺ mapsto ↦ longmapsto ⟼ hookrightarrow ↪
    uparrow ↑ downarrow ↓ updownarrow ↕ Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌ leadsto ⇝
    vdash ⊢ dashv ⊣ models ⊨ Vdash ⊩ perp ⟂ mid ∣ colon : parallel ∥ nparallel ∦ asymp ≍ doteq ≐ triangleq ≜ coloneqq ≔
    lesssim ≲ gtrsim ≳ nmid ∤ nleq ≰ ngeq ≱ nless ≮ ngtr ≯ nsubseteq ⊈ xrightarrow → vartriangleleft ⊲ trianglelefteq ⊴"""
)
_OPERATORS = {
    **_pairs(
        """sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀
        limsup lim␣sup liminf lim␣inf argmax arg␣max argmin arg␣min"""
    ),
    **{
        name: name
        for name in _words(
            """sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp lim max min sup
        inf det dim ker deg gcd lcm hom arg Pr mod sgn tr"""
        )
    },
}
_OPENING = _pairs("langle ⟨ lfloor ⌊ lceil ⌈ lvert | lVert ‖ { { lbrack [ lbrace { llbracket ⟦")
_CLOSING = _pairs("rangle ⟩ rfloor ⌋ rceil ⌉ rvert | rVert ‖ } } rbrack ] rbrace } rrbracket ⟧")
_SPACES = frozenset(
    (",", ":", ";", ">", " ", "quad", "qquad", "enspace", "enskip", "thinspace", "medspace", "thickspace", "space")
)
_NOTHING = _words(
    """! displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits nonumber notag left right middle big Big bigg Bigg
    bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm rm bf it sf tt cal hfill hline allowbreak nobreak negthinspace"""
)
_SIZED = frozenset(
    name for name in _NOTHING if name.lower().rstrip("lrm") in ("big", "bigg") or name in ("left", "right", "middle")
)
_FONTS = _words(
    """mathrm mathit mathsf mathtt mathnormal mathbf boldsymbol bm pmb mathfrak operatorname text textbf textit textrm textsf
    texttt textnormal mbox hbox mathop mathbin mathrel mathord emph ensuremath operatorname*"""
)
_TEXT = frozenset(("text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "mbox", "hbox", "emph"))
_DOUBLE = dict(zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ1", "𝔸𝔹ℂ𝔻𝔼𝔽𝔾ℍ𝕀𝕁𝕂𝕃𝕄ℕ𝕆ℙℚℝ𝕊𝕋𝕌𝕍𝕎𝕏𝕐ℤ𝟙", strict=True))
_SCRIPT = dict(zip("BEFHILMR", "ℬℰℱℋℐℒℳℛ", strict=True))  # those that fonts of terminals have; the others stay letters
_ACCENTS = {
    "hat": "\u0302", "widehat": "\u0302", "bar": "\u0304", "overline": "\u0305", "tilde": "\u0303", "widetilde": "\u0303",
    "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308", "underline": "\u0332", "check": "\u030c", "acute": "\u0301",
    "grave": "\u0300", "mathring": "\u030a", "breve": "\u0306",
}  # fmt: skip
_EVERY = frozenset(("overline", "underline"))  # accents that stand on each letter of several
_SUPER = dict(
    zip(
        "0123456789+−=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWβγδθφχ′∘°,⊤†∗*",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵝᵞᵟᶿᵠᵡ′°°,ᵀ†**",
        strict=True,
    )
)
_SUB = dict(zip("0123456789+−=()aehijklmnoprstuvxβγρφχ,", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ,", strict=True))
_VULGAR = _pairs("1/2 ½ 1/3 ⅓ 2/3 ⅔ 1/4 ¼ 3/4 ¾ 1/5 ⅕ 2/5 ⅖ 3/5 ⅗ 4/5 ⅘ 1/6 ⅙ 5/6 ⅚ 1/8 ⅛ 3/8 ⅜ 5/8 ⅝ 7/8 ⅞")
_ROOTS = {"": "√", "2": "√", "3": "∛", "4": "∜"}
_NOT = {
    "=": "≠",
    "∈": "∉",
    "⊂": "⊄",
    "⊆": "⊈",
    "≡": "≢",
    "∼": "≁",
    "≈": "≉",
    "≤": "≰",
    "≥": "≱",
    "<": "≮",
    ">": "≯",
    "∣": "∤",
    "∃": "∄",
}

_TOKEN = re.compile(r"\\(?:[A-Za-z]+\*?|.)|\s+|.", re.DOTALL)
# What needs no brackets above a fraction's bar: a product.
_SIMPLE = re.compile(r"[\w⁺⁻⁰-₎′°·…∞∂Δ√\u0300-\u036f\u20d0-\u20ff]*(\([^()]*\))?")
_BRACKETS_ALONE = re.compile(r"\([^()]*\)|\|[^|]*\||‖[^‖]*‖")


_WORDS = re.compile(r"[^\W\d_]{2,} +\w|\w +[^\W\d_]{2,}")
# What needs no brackets below a fraction's bar: a number, a letter with its scripts, a root, a word.
_ONE_FACTOR = re.compile(r"\d+|[d∂Δ]?[^\W\d_][₀-₎ₐ-ₜᵢᵣᵤᵥⱼ⁺⁻⁰-⁹²³ᵀ\u0300-\u036f\u20d7]*|√\w+|\w+_\w+|[^\W\d_]{5,}")


class UnreadableError(Exception):
    """The formula has no readable Unicode form."""


class Atom(NamedTuple):
    """A part of a formula: its rows (several only for a matrix) and class. middle: the row for alignment."""

    kind: Kind
    rows: tuple[str, ...]
    middle: int = 0

    @property
    def text(self) -> str:
        """Its only row. Raises UnreadableError where there are more."""
        if len(self.rows) > 1:
            raise UnreadableError
        return self.rows[0]


@lru_cache(512)
def to_unicode(source: str) -> str | None:
    """Return ``source``, without delimiters, as one row; None where the source is more readable."""
    rows = _converted(source, display=False)
    return None if rows is None else rows[0]


@lru_cache(512)
def to_rows(source: str) -> tuple[str, ...] | None:
    return _converted(source, display=True)


def _converted(source: str, *, display: bool) -> tuple[str, ...] | None:
    if len(source) > LONGEST:
        return None
    try:
        reader = _FormulaReader(_TOKEN.findall(source), display=display)
        grid = reader.grid(None)
        if not display:
            if len(grid) > 1 or any(len(row) > 1 for row in grid):
                return None
            return (_joined(grid[0][0]).text.strip(),)
        return tuple(row.rstrip() for row in _aligned(grid))
    except UnreadableError:
        return None


Grid = list[list[list[Atom]]]  # rows of cells of atoms


@dataclass(slots=True)
class _FormulaReader:
    tokens: Sequence[str]
    display: bool
    at: int = 0
    depth: int = 0

    def grid(self, until: str | None) -> Grid:
        """Read rows (``\\\\``) of cells (``&``) until ``\\end{until}`` or the end."""
        rows: Grid = [[[]]]
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token == "\\\\":
                self.at += 1
                self._optional()
                rows.append([[]])
            elif token == "&":
                self.at += 1
                rows[-1].append([])
            elif token == "\\end":
                self.at += 1
                if until is None or self._name() != until:
                    raise UnreadableError
                return self._without_last(rows)
            elif token == "}":
                raise UnreadableError
            else:
                self._atom(rows[-1][-1])
        if until is not None:
            raise UnreadableError
        return self._without_last(rows)

    @staticmethod
    def _without_last(rows: Grid) -> Grid:
        if len(rows) > 1 and rows[-1] == [[]]:
            rows.pop()
        return rows

    def _group(self) -> list[Atom]:
        self._skip_space()
        if self.at >= len(self.tokens):
            raise UnreadableError
        atoms: list[Atom] = []
        if self.tokens[self.at] != "{":
            self._atom(atoms)
            return atoms
        self.at += 1
        while self._peek() != "}":
            if self._peek() in ("", "&", "\\\\"):
                raise UnreadableError
            self._atom(atoms)
        self.at += 1
        return atoms

    def _name(self) -> str:
        self._skip_space()
        if self._peek() != "{":
            raise UnreadableError
        start = self.at + 1
        depth = 0
        while self.at < len(self.tokens):
            depth += {"{": 1, "}": -1}.get(self.tokens[self.at], 0)
            self.at += 1
            if not depth:
                return "".join(self.tokens[start : self.at - 1])
        raise UnreadableError

    def _optional(self) -> str:
        if self._peek() != "[":
            return ""
        try:
            end = self.tokens.index("]", self.at)
        except ValueError:
            raise UnreadableError from None
        found = "".join(self.tokens[self.at + 1 : end])
        self.at = end + 1
        return found

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _skip_space(self) -> None:
        while self._peek().isspace():
            self.at += 1

    def _atom(self, atoms: list[Atom]) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UnreadableError
        self._token(self.tokens[self.at], atoms)
        self.depth -= 1

    def _token(self, token: str, atoms: list[Atom]) -> None:
        if token == "{":
            atoms.append(_joined(self._group()))
            return
        self.at += 1
        if token.startswith("\\") and len(token) > 1:
            self._command(token[1:], atoms)
        elif token in "^_":
            self._script(token, atoms)
        elif token == "'":
            _append_script(atoms, "′")
        elif token == "~":
            atoms.append(Atom("space", (" ",)))
        elif token in ",:" and self._between_digits():
            atoms.append(Atom("ord", (token,)))
        elif not token.isspace():
            atoms.append(_character(token))

    def _between_digits(self) -> bool:
        return self.at > 1 and self.tokens[self.at - 2].isdigit() and self._peek().isdigit()

    def _script(self, sign: str, atoms: list[Atom]) -> None:
        text = _joined(self._group()).text.strip()
        table, close = (_SUPER, text.replace(" ", "")) if sign == "^" else (_SUB, text.replace(" ", ""))
        if close and all(char in table for char in close):
            written = "".join(table[char] for char in close)
        elif len(close) == 1 or (sign == "_" and close.isalnum()):
            written = sign + close
        else:
            written = f"{sign}({text if _WORDS.search(text) else close})"
        _append_script(atoms, written)

    def _command(self, name: str, atoms: list[Atom]) -> None:
        if name in _LETTERS:
            atoms.append(Atom("ord", (_LETTERS[name],)))
        elif name in _BINARY:
            atoms.append(Atom("bin", (_BINARY[name],)))
        elif name in _RELATIONS:
            above = self._xarrow() if name.startswith("x") else ""
            atoms.append(Atom("rel", (_RELATIONS[name] + above,)))
        elif name in _OPERATORS:
            atoms.append(Atom("op", (_OPERATORS[name].replace("␣", " "),)))
        elif name in _OPENING:
            atoms.append(Atom("open", (_OPENING[name],)))
        elif name in _CLOSING:
            atoms.append(Atom("close", (_CLOSING[name],)))
        elif name in _SPACES:
            atoms.append(Atom("space", ("  " if "quad" in name else " ",)))
        elif name in _NOTHING:
            if name in _SIZED:
                self._skip_space()
                if self._peek() == ".":
                    self.at += 1
        elif name in _FONTS:
            self._font(name, atoms)
        elif name in _ACCENTS:
            atoms.append(_accented(_joined(self._group()).text, name))
        else:
            self._construct(name, atoms)

    def _xarrow(self) -> str:
        self._optional()
        return f" ({_joined(self._group()).text})"

    def _font(self, name: str, atoms: list[Atom]) -> None:
        if name in _TEXT:
            atoms.append(Atom("ord", (re.sub(r"\\([#$%&_{} ])", r"\1", self._name()).replace("~", " "),)))
            if "\\" in atoms[-1].text or "$" in atoms[-1].text:
                raise UnreadableError
            return
        joined = _joined(self._group())
        atoms.append(joined._replace(kind="op") if name.startswith("operatorname") else joined)

    def _construct(self, name: str, atoms: list[Atom]) -> None:
        match name:
            case "frac" | "dfrac" | "tfrac" | "cfrac":
                above, below = (_joined(self._group()).text.strip() for _ in range(2))
                atoms.append(_fraction(above, below))
            case "sqrt":
                degree = self._optional()
                atoms.append(_root(degree, _joined(self._group()).text.strip()))
            case "binom" | "dbinom" | "tbinom":
                above, below = (_joined(self._group()).text.strip() for _ in range(2))
                atoms.append(Atom("ord", (f"C({above}, {below})",)))
            case "mathbb" | "mathcal" | "mathscr":
                table = _DOUBLE if name == "mathbb" else _SCRIPT
                text = _joined(self._group()).text
                atoms.append(Atom("ord", ("".join(table.get(char, char) for char in text),)))
            case "boxed" | "fbox":
                atoms.append(Atom("ord", (f"[ {_joined(self._group()).text.strip()} ]",)))
            case "tag":
                atoms.append(Atom("space", (f"    ({self._name()})",)))
            case "label":
                self._name()
            case "pmod":
                atoms.append(Atom("ord", (f" (mod {_joined(self._group()).text.strip()})",)))
            case "not":
                self._negate(atoms)
            case "underset":
                under = self._group()
                atoms += self._group()
                _append_script(atoms, f"_({_joined(under).text.strip()})")
            case "phantom" | "hspace" | "vspace" | "color":
                self._name()
            case "begin":
                self._environment(atoms)
            case _:
                raise UnreadableError

    def _negate(self, atoms: list[Atom]) -> None:
        negated = _NOT.get(_joined(self._group()).text)
        if negated is None:
            raise UnreadableError
        atoms.append(Atom("rel", (negated,)))

    def _environment(self, atoms: list[Atom]) -> None:
        name = self._name()
        plain = name.rstrip("*")
        if plain == "array":
            self._name()
        grid = self.grid(name)
        if plain in _ALIGNED:
            atoms.append(_stacked(_aligned(grid), "", "", display=self.display))
        elif plain in _BRACKETS:
            rows = list(_columns(grid))
            atoms.append(_stacked(rows, *_BRACKETS[plain], display=self.display))
        else:
            raise UnreadableError


_ALIGNED = _words("align aligned alignat split gather gathered equation multline eqnarray displaymath math")
# Of several rows: the first, those between, the last; then that of a single row.
_BRACKETS = {
    "matrix": ("", ""), "array": ("", ""), "smallmatrix": ("", ""), "pmatrix": ("⎛⎜⎝(", "⎞⎟⎠)"), "bmatrix": ("⎡⎢⎣[", "⎤⎥⎦]"),
    "vmatrix": ("││││", "││││"), "Vmatrix": ("‖‖‖‖", "‖‖‖‖"), "Bmatrix": ("⎧⎪⎩{", "⎫⎪⎭}"), "cases": ("⎧⎪⎩{", ""),
}  # fmt: skip


def _character(char: str) -> Atom:
    match char:
        case "-":
            return Atom("bin", ("−",))
        case "+" | "*":
            return Atom("bin", (char,))
        case "=" | "<" | ">" | ":":
            return Atom("rel", (char,))
        case "," | ";":
            return Atom("punct", (char,))
        case "(" | "[":
            return Atom("open", (char,))
        case ")" | "]":
            return Atom("close", (char,))
        case _:
            return Atom("ord", (char,))


def _append_script(atoms: list[Atom], written: str) -> None:
    while atoms and atoms[-1].kind == "space":
        atoms.pop()
    last = atoms.pop() if atoms else Atom("ord", ("",))
    if last.kind == "frac" or (last.kind == "ord" and " " in last.rows[0].strip() and len(last.rows) == 1):
        last = Atom("close", (f"({last.text})",))
    if len(last.rows) > 1:  # at a matrix's last bracket
        atoms += (last, Atom("ord", (written,)))
        return
    atoms.append(
        last._replace(rows=(last.rows[0] + written,), kind="ord" if last.kind in ("bin", "rel") else last.kind)
    )


def _accented(text: str, name: str) -> Atom:
    mark = _ACCENTS[name]
    if len(text) == 1 or (name in _EVERY and text.isalnum()):
        return Atom("ord", (normalize("NFC", "".join(char + mark for char in text)),))
    raise UnreadableError


def _fraction(above: str, below: str) -> Atom:
    if vulgar := _VULGAR.get(f"{above}/{below}"):
        return Atom("ord", (vulgar,))
    return Atom("frac", (f"{_bracketed(above)}/{_bracketed(below, whole=True)}",))


def _bracketed(text: str, *, whole: bool = False) -> str:
    simple = (_ONE_FACTOR if whole else _SIMPLE).fullmatch(text) or _BRACKETS_ALONE.fullmatch(text)
    return text if simple and text else f"({text})"


def _root(degree: str, text: str) -> Atom:
    sign = _ROOTS.get(degree)
    if sign is None:
        if not all(char in _SUPER for char in degree):
            raise UnreadableError
        sign = "".join(_SUPER[char] for char in degree) + "√"
    one = re.fullmatch(r"\d+|\w[₀-₎ₐ-ₜᵢᵣᵤᵥⱼ]*|\([^()]*\)", text)
    return Atom("ord", (sign + (text if one else f"({text})"),))


_APART = {
    ("ord", "op"), ("close", "op"), ("op", "ord"), ("op", "op"), ("op", "frac"), ("frac", "ord"), ("ord", "frac"), ("frac", "frac"),
    ("close", "frac"), ("frac", "op"),
}  # fmt: skip
_BESIDE_SIGNS = frozenset(("ord", "frac", "close"))


def _gap(before: Kind | None, atom: Atom, after: Kind | None) -> tuple[str, str]:
    if atom.kind == "rel":
        return ("" if before is None else " "), ("" if after is None else " ")
    if atom.kind == "bin":
        between = before in _BESIDE_SIGNS and after not in (None, "rel", "punct", "close")
        return (" ", " ") if between else ("", "")
    if atom.kind == "punct":
        return "", ("" if after in (None, "close") else " ")
    if before is not None and (before, atom.kind) in _APART:
        return " ", ""
    return "", ""


def _joined(atoms: Sequence[Atom]) -> Atom:
    if len(atoms) == 1:
        return atoms[0]
    made = Atom("ord", ("",))
    seen: Kind | None = None
    solid = [atom.kind for atom in atoms if atom.kind != "space"]
    index = 0
    for atom in atoms:
        if atom.kind == "space":
            made = _beside(
                made, (" " if made.rows[0].endswith(" ") else "") + atom.rows[0] if len(atom.rows[0]) > 1 else " "
            )
            continue
        after = solid[index + 1] if index + 1 < len(solid) else None
        before, behind = _gap(seen, atom, after)
        made = _beside(made, before, atom, behind)
        seen, index = (atom.kind if not (atom.kind == "bin" and not before) else "open"), index + 1
    return made


def _beside(*parts: Atom | str) -> Atom:
    atoms = [Atom("ord", (part,)) if isinstance(part, str) else part for part in parts]
    if all(len(atom.rows) == 1 for atom in atoms):
        text = ""
        for atom in atoms:
            text += atom.rows[0].lstrip(" ") if text.endswith(" ") and atom.rows[0] != "  " else atom.rows[0]
        return Atom("ord", (text,))
    above = max(atom.middle for atom in atoms)
    below = max(len(atom.rows) - atom.middle for atom in atoms)
    blocks = []
    for atom in atoms:
        width = max(map(cell_len, atom.rows))
        rows = [""] * (above - atom.middle) + list(atom.rows)
        blocks.append([row + " " * (width - cell_len(row)) for row in rows + [""] * (above + below - len(rows))])
    return Atom("ord", tuple("".join(row) for row in zip(*blocks, strict=True)), above)


def _aligned(grid: Grid) -> list[str]:
    if len(grid) == 1:
        return list(_joined([atom for cell in grid[0] for atom in cell]).rows)
    lines = []
    for row in grid:
        # The cell after & begins with a relation whose left side is in the cell before.
        cells = [
            _joined(cell if not index else [Atom("ord", ("",)), *cell]).text.strip() for index, cell in enumerate(row)
        ]
        lines.append(cells)
    widths = [max(map(cell_len, column)) for column in zip_longest(*lines, fillvalue="")]
    made = []
    for cells in lines:
        padded = [
            cell + " " * (width - cell_len(cell)) if index % 2 else " " * (width - cell_len(cell)) + cell
            for index, (cell, width) in enumerate(zip(cells, widths, strict=False))
        ]
        made.append(" ".join(padded) if len(widths) > 1 else padded[0].strip())
    return made


def _columns(grid: Grid) -> Iterable[str]:
    cells = [[_joined(cell).text.strip() for cell in row] for row in grid]
    widths = [max(map(cell_len, column)) for column in zip_longest(*cells, fillvalue="")]
    for row in cells:
        whole = row + [""] * (len(widths) - len(row))
        yield "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(whole, widths, strict=True))


def _stacked(rows: Sequence[str], left: str, right: str, *, display: bool) -> Atom:
    if len(rows) == 1 or not display:
        first, last = left[-1:], right[-1:]
        if len(rows) > 1 and not left:
            raise UnreadableError
        return Atom("close", (first + "; ".join(" ".join(row.split()) for row in rows) + last,))
    return Atom(
        "close",
        tuple(_side(left, at, len(rows)) + row + _side(right, at, len(rows)) for at, row in enumerate(rows)),
        len(rows) // 2,
    )


def _side(brackets: str, at: int, count: int) -> str:
    return brackets[0 if at == 0 else 2 if at == count - 1 else 1] if brackets else ""
