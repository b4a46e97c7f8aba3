"""Compaction on SmolLM2: what was read is not read again, and what the branch holds is answered.

A model of 135M parameters writes no summary that holds facts, so the summary is given here. Of 40 facts in 40 turns it
answers 4 with all of them in the context, 4 behind a window of 640 tokens, and none after two summaries of its own.
"""

from tokamac.app.chat.compaction import INSTRUCTION, branch, most_tokens, plan
from tokamac.app.chat.conversation import Conversation, Reply
from tokamac.engine import Engine, Finished, Message, Sampling

SYSTEM = "You are a helpful assistant."
FACTS = (("dog's name", "Rex"), ("cat's name", "Mina"), ("sister's city", "Oslo"), ("brother's job", "baker"))


def told() -> Conversation:
    made = Conversation()
    for name, value in FACTS:
        prompt = made.tree.ask(f"My {name} is {value}.", made.tree.head)
        made.tree.add_reply(prompt.key, Reply("Noted."))
    return made


def ask(engine: Engine, messages: tuple[Message, ...], tokens: int) -> Finished:
    *_, last = engine.generate(messages, Sampling(temperature=0, max_tokens=tokens))
    assert isinstance(last, Finished)
    return last


def test_the_summary_is_asked_for_at_the_end_of_what_was_read(engine: Engine) -> None:
    chat = told()
    read = ask(engine, chat.request(SYSTEM, "Thanks."), 4).metrics.prompt_tokens
    made = plan(chat, SYSTEM)
    asked = ask(engine, made.messages, most_tokens(512)).metrics
    assert asked.cached_tokens > 0.5 * read  # all but the last turn
    assert asked.prompt_tokens - asked.cached_tokens < 2 * len(engine.tokenizer.encode(INSTRUCTION))


def test_what_the_branch_holds_is_answered(engine: Engine) -> None:
    chat = told()
    before = ask(engine, chat.request(SYSTEM, "Hi."), 1).metrics.prompt_tokens
    made = plan(chat, SYSTEM)
    assert made is not None
    assert branch(chat, made, Reply("\n".join(f"- The user's {name} is {value}." for name, value in FACTS[:-1])))
    assert [turn.prompt for turn in chat.turns] == [INSTRUCTION, "My brother's job is baker."]
    for name, value in (FACTS[0], FACTS[-1]):
        assert value in ask(engine, chat.request(SYSTEM, f"What is my {name}?"), 16).text
    chat.tree.go(min(chat.tree.nodes))  # back: the whole chat is there
    assert ask(engine, chat.request(SYSTEM, "Hi."), 1).metrics.prompt_tokens == before
