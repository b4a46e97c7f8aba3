"""What the engine promises of replies, held on SmolLM2: caches, guesses and neighbours change no token, and a schema holds."""

import json
from pathlib import Path

import pytest

from tests.bench.texts import PROSE
from tests.waiting import until
from tokamac.engine import Engine, Finished, Message, PromptCacheSpec, Sampling, TextChunk

GREEDY = Sampling(temperature=0, max_tokens=48)
STORY = f"Here is a story.\n\n{2 * PROSE}\n\nWhat happened in the night?"
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Repeat three times: the old man cut a new notch into the post.",
)


def replies(engine: Engine, *questions: str) -> list[Finished]:
    return [engine.ask(question, GREEDY) for question in questions]


@pytest.mark.usefixtures("all_worth_storing")
def test_caches_in_memory_and_on_disk_change_no_token(smollm2: Path, tmp_path: Path) -> None:
    kept = PromptCacheSpec(folder=tmp_path)
    with Engine.load(smollm2, prompt_cache=None) as engine:
        cold = engine.ask(STORY, GREEDY)
        longer = [Message("user", STORY), Message("assistant", cold.text), Message("user", "Was anybody hurt?")]
        cold_next = engine.ask(longer, GREEDY)
    with Engine.load(smollm2, prompt_cache=kept) as engine:
        first, again, further = engine.ask(STORY, GREEDY), engine.ask(STORY, GREEDY), engine.ask(longer, GREEDY)
    with Engine.load(smollm2, prompt_cache=kept) as engine:
        read = engine.ask(longer, GREEDY)
    assert first.metrics.cached_tokens == 0
    assert min(again.metrics.cached_tokens, further.metrics.cached_tokens, read.metrics.cached_tokens) > 256
    assert {first.ids, again.ids} == {cold.ids}
    assert {further.ids, read.ids} == {cold_next.ids}


def test_guesses_change_no_token(engine: Engine, smollm2: Path) -> None:
    guessed = replies(engine, *QUESTIONS)
    with Engine.load(smollm2, prompt_cache=None, speculation=None) as plain:
        expected = [each.ids for each in replies(plain, *QUESTIONS)]
    assert [each.ids for each in guessed] == expected
    # A busy machine's timings may say for a while that guesses don't pay.
    again = [guessed[-1]]
    until(lambda: again[-1].metrics.drafted_tokens or again.append(engine.ask(QUESTIONS[-1], GREEDY)))
    assert {each.ids for each in again} == {expected[-1]}


def test_replies_made_at_once_are_those_made_one_by_one(engine: Engine) -> None:
    alone = replies(engine, *QUESTIONS)
    ids: dict[int, list[int]] = {number: [] for number in range(len(QUESTIONS))}
    most = 0
    for number, _, event in engine.generate_many(QUESTIONS, GREEDY):
        if isinstance(event, TextChunk | Finished):
            ids[number] += event.ids
        if isinstance(event, Finished):
            most = max(most, event.metrics.replies_at_once)
    assert most > 1
    assert [tuple(each) for each in ids.values()] == [each.ids for each in alone]


def test_an_answer_keeps_to_its_schema(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "country": {"enum": ["France", "Italy"]},
            "people": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        },
        "required": ["city", "country", "people"],
        "additionalProperties": False,
    }
    for temperature in (0, 1.0):
        sampling = Sampling(temperature=temperature, seed=7, max_tokens=200, json_schema=schema)
        answer = engine.ask("Describe Paris: its name, its country, how many people live there.", sampling)
        assert answer.reason == "stop"
        found = json.loads(answer.text)
        assert found.keys() == {"city", "country", "people"}
        assert found["country"] in {"France", "Italy"}
        assert 0 <= found["people"] <= 99_999_999
