"""How few tokens a text can have, known before it is encoded; and how little of a long one is read."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import make_tiny
from tests.waiting import until
from tokamac.assets import asset_path
from tokamac.engine import ContextError, Engine, Message, Sampling
from tokamac.engine.events import Finished, TextChunk
from tokamac.engine.text.length import LongestPieces
from tokamac.engine.text.tokenizer import load_tokenizer

GUIDE = load_tokenizer(asset_path("guide", "model"), {}, "guide")


@given(st.text(max_size=200) | st.text("ab \n-=9é", max_size=400))
def test_a_text_has_no_fewer_tokens_than_its_characters_allow(text: str) -> None:
    assert GUIDE.longest_pieces.least_tokens(text) <= len(GUIDE.encode(text))
    assert LongestPieces().least_tokens(text) == 0  # of a tokenizer that may leave out parts


@pytest.mark.parametrize(("text", "tokens"), [("Prefill reads. " * 40_000, 100), ("a " * 400_000, 30_000)])
def test_of_a_text_that_is_too_long_a_lower_bound_is_told(text: str, tokens: int) -> None:
    assert tokens < GUIDE.exceeds(text, tokens) <= len(GUIDE.encode(text))
    assert GUIDE.exceeds(text, len(text)) == 0


class Slow(str):
    """A text whose rendering waits."""

    def __new__(cls, text: str, steps: Iterator[None]) -> "Slow":
        made = super().__new__(cls, text)
        made.steps = steps  # type: ignore[attr-defined]
        return made

    def replace(self, *given: Any) -> str:  # type: ignore[override]
        next(self.steps, None)  # type: ignore[attr-defined]
        return super().replace(*given)


def test_tokens_are_made_while_another_prompt_is_rendered(tmp_path: Path) -> None:
    with Engine.load(make_tiny(tmp_path, context=4096)) as engine:
        written = engine.generate([1, 2, 3], Sampling(temperature=0, max_tokens=400, min_tokens=400, loop_check=False))
        made = (each for each in written if isinstance(each, TextChunk | Finished))

        def rendering() -> Iterator[None]:
            seen.extend(itertools.islice(made, 20))
            yield None

        seen: list[Any] = []
        engine.ask([Message("user", Slow("Hello", rendering()))], Sampling(temperature=0, max_tokens=1))
        assert len(seen) == 20
        written.close()
        with pytest.raises(ContextError, match="at least"):
            engine.ask("Prefill reads. " * 40_000)


def test_what_is_read_ahead_is_rendered_beside_the_replies(tmp_path: Path) -> None:
    with Engine.load(make_tiny(tmp_path, context=4096)) as engine:
        told: list[object] = []

        def rendering() -> Iterator[None]:
            engine.between(lambda: told.append("free"))
            yield None

        engine.warm_ahead([Message("user", Slow("Hello", rendering()))], then=told.append)
        until(lambda: len(told) == 2)
        assert told[0] == "free"
        assert engine.price([Message("user", "Hello")]).tokens < engine.price([Message("user", "Hello")]).prompt_tokens
