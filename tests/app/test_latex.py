"""Formulas as Unicode: what is readable, what stays its source, and that no input takes long or fails."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from tokamac.app.text.latex import to_rows, to_unicode


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("E=mc^2", "E = mc²"), (r"Q \cdot K^T", "Q·Kᵀ"),
        (r"\text{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)V", "softmax(QKᵀ/√dₖ)V"),
        (r"\sum_{i=1}^{n} x_i^2", "∑ᵢ₌₁ⁿ xᵢ²"),
        (r"x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", "x = (−b ± √(b² − 4ac))/(2a)"), (r"\frac{1}{2}mv^2", "½mv²"),
        (r"\frac{a+b}{c}", "(a + b)/c"), (r"\frac{dy}{dx}", "dy/dx"),
        (r"-\frac{\partial \mathbf{B}}{\partial t}", "−∂B/∂t"),
        (r"\lim_{x \to 0} \frac{\sin x}{x} = 1", "lim_(x→0) (sin x)/x = 1"),
        (r"W_Q \in \mathbb{R}^{d \times d_k}", "W_Q ∈ ℝ^(d×dₖ)"), (r"e^{-x^2}\,dx", "e^(−x²) dx"),
        (r"\hat{y} = f'(x)", "ŷ = f′(x)"), (r"x=-1,\ y", "x = −1, y"), ("1,000", "1,000"),
        (r"\sqrt[3]{x+1}", "∛(x + 1)"), (r"d_{\text{model}}", "d_model"), (r"\|x\|_2 \le 90^\circ", "‖x‖₂ ≤ 90°"),
        (r"10^{-3}\%", "10⁻³%"), (r"\begin{pmatrix}a&b\\c&d\end{pmatrix}", "(a b; c d)"), ("ünïcode→", "ünïcode→"),
    ],
)  # fmt: skip
def test_what_can_be_read_in_unicode(source: str, shown: str) -> None:
    assert to_unicode(source) == shown


@pytest.mark.parametrize(
    "source",
    [
        r"\unheard{x}", "{x", "x}", r"\frac{a}", "a & b", r"a \\ b", r"\begin{tikz}x\end{tikz}", r"\begin{align}x", "^",
        "x" * 5_000,
    ],
)  # fmt: skip
def test_what_can_not_stays_its_source(source: str) -> None:
    assert to_unicode(source) is None


def test_matrices_cases_and_aligned_formulas_have_rows() -> None:
    assert to_rows(r"A = \begin{pmatrix} a & b \\ cc & d \end{pmatrix} x") == ("    ⎛a   b⎞", "A = ⎝cc  d⎠x")
    assert to_rows(r"f = \begin{cases} 1 & \text{if } x \\ 0 & \text{else} \end{cases}") == (
        "    ⎧1  if x",
        "f = ⎩0  else",
    )
    assert to_rows(r"\begin{align} a &= b \\ c + d &= e \end{align}") == ("    a = b", "c + d = e")


COMMANDS = r"\\ \frac \sqrt \sum \left( \right) \text{hi} \begin{pmatrix} \end{pmatrix} \begin{align} \end{align} \mathbb \not \hat"
PIECES = st.sampled_from([*"ab12+-=^_{}&()[],'~ \\", *COMMANDS.split(" ")])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_converted_or_left(source: str) -> None:
    row, rows = to_unicode(source), to_rows(source)
    assert row is None or "\n" not in row
    assert rows is None or all(cell_len(each) >= 0 for each in rows)


UNFINISHED = ("{", "^", "_{", "\\frac", "\\sqrt[", "\\begin{matrix}", "\\hat ")


@pytest.mark.parametrize(
    ("piece", "shown"), [*((piece, None) for piece in UNFINISHED), ("\\left(", "("), ("''", "′′"), ("a(", "a(")]
)
def test_no_text_is_too_deep(piece: str, shown: str | None) -> None:
    count = 4_000 // len(piece)
    rows = to_rows(piece * count)
    assert (rows and list(rows)) == (None if shown is None else [shown * count])
