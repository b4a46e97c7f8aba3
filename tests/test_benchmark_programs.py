"""What the benchmarks run besides the product itself still runs: nobody else does, until figures are renewed."""

from tests.benchmarks import long_child
from tests.benchmarks.texts import SHOWN_PROSE
from tokamac.app.backend.protocol import Load
from tokamac.engine.events import Finished, Message
from tokamac.engine.options import Sampling


def test_the_child_of_long_replies_recites_as_many_tokens_as_are_asked_for() -> None:
    engine, _ = long_child.load(Load("guide", prompt_cache=False), lambda _: None)
    try:
        *_, finished = engine.generate([Message("user", "What is decode?")], Sampling(temperature=0.0, max_tokens=300))
    finally:
        engine.close()
    assert isinstance(finished, Finished)
    assert finished.metrics.generated_tokens == 300
    assert finished.text == SHOWN_PROSE[: 300 * long_child.CHARACTERS]
