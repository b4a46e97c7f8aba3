"""Sizes as text."""

import pytest

from tokamac.engine.files import figures, size, sizes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1_250, "1.25 kB"), (1_250_000, "1.25 MB"), (10**8, "100 MB"), (2**34, "17.2 GB"),
        (1_023_400_000_000, "1.02 TB"), (-5, "-5 B"),
    ],
)  # fmt: skip
def test_a_size_is_written_in_three_figures(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.984, "0.98"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (1024, "1,024")]
)
def test_figures_do_not_grow_by_rounding(value: float, text: str) -> None:
    assert figures(value) == text


def test_two_sizes_that_look_alike_are_told_apart() -> None:
    assert sizes(1_500_000, 2_500_000) == ("1.50 MB", "2.50 MB")
    assert sizes(2_000_100, 2_000_200) == ("2,000,100 B", "2,000,200 B")
    assert sizes(5, 5) == ("5 B", "5 B")
