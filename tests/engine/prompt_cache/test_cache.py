"""The prompt cache as a program meets it, and under random use: warm equals cold."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.helpers import finish, write_model
from tests.engine.inside import disk_of, held_of, nodes_of, replies_of, runtime_of, store_of, worker_of
from tests.engine.prompt_cache.test_disk import BENCHES, KINDS, LARGE, ask, compute
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S, until
from tokamac.engine import (
    Branch,
    Chat,
    Edit,
    Engine,
    Finished,
    KVSpec,
    Message,
    OptionError,
    PromptCacheSpec,
    Regenerate,
    Sampling,
    Send,
    TextChunk,
)
from tokamac.engine.kv import snapshot
from tokamac.engine.prompt_cache import cache, folder, memory
from tokamac.engine.prompt_cache.folder import FILE, Budgets, Folder, digest, identify
from tokamac.engine.prompt_cache.memory import CacheLease

# The prompt cache as a program meets it: prices that come true, warming ahead, re-reading after thinking, checking
# the disk.

SHORT = Sampling(temperature=0, max_tokens=6)
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture
def engine(tiny: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine.load(tiny, prompt_cache=PromptCacheSpec(folder=tmp_path / "cache")) as engine:
        yield engine


@pytest.fixture
def talk(engine: Engine) -> Chat:
    chat = engine.chat("Be brief.")
    for text in ("first question", "second question"):
        list(chat.send(text, SHORT))
    return chat


ACTIONS: dict[str, tuple[Any, Callable[[Chat], Iterator[Any]]]] = {
    "send": (Send("and a third"), lambda chat: chat.send("and a third", SHORT)),
    "regenerate": (Regenerate(), lambda chat: chat.regenerate(SHORT)),
    "edit": (Edit(2, "another second"), lambda chat: edited(chat, 2, "another second")),
    "edit the first": (Edit(0, "another first"), lambda chat: edited(chat, 0, "another first")),
    "branch": (Branch(2), lambda chat: chat.branch(2).regenerate(SHORT)),
}


def edited(chat: Chat, index: int, text: str) -> Iterator[Any]:
    chat.edit(index, text)
    return chat.regenerate(SHORT)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_price_is_what_the_action_then_costs(talk: Chat, name: str) -> None:
    action, act = ACTIONS[name]
    price = talk.price(action)
    metrics = finish(act(talk)).metrics
    assert (price.prompt_tokens, price.tokens) == (metrics.prompt_tokens, metrics.prefill_tokens)
    assert price.disk_bytes == 0


def test_regenerate_costs_one_token_and_an_edit_what_follows_it(talk: Chat) -> None:
    assert talk.price(Regenerate()).tokens == 1
    whole = talk.price(Send("and a third"))
    assert talk.price(Edit(2, "another second")).tokens < whole.prompt_tokens / 2


class Known:
    """A latency of a thousandth of a second a token."""

    def decode_s(self, work: object, context: int, batch: int = 1) -> float:
        return 0.001

    def prefill_s(self, work: object, tokens: int, cached: int, chunk: int) -> float:
        return 0.001 * tokens


def test_seconds_are_unknown_then_estimated_then_measured(tiny: Path) -> None:
    with Engine.load(tiny, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        chat, machine = engine.chat(), runtime_of(engine).machine
        engine.between(lambda: setattr(machine, "latency", None))
        price = chat.price(Send(TEXT))
        assert (price.seconds, price.estimated) == (None, False)
        engine.between(lambda: setattr(machine, "latency", Known()))
        price = chat.price(Send(TEXT))
        assert price.estimated
        assert price.seconds == pytest.approx(0.001 * price.tokens)
        list(chat.send(TEXT, SHORT))
        price = chat.price(Send(TEXT))
        assert price.seconds > 0
        assert not price.estimated


def test_switching_between_branches_computes_what_differs(talk: Chat) -> None:
    other = talk.branch(1)
    costs = [finish(chat.send(text, SHORT)).metrics.prefill_tokens for chat, text in ((talk, "a b c"), (other, "x"))]
    again = [finish(chat.regenerate(SHORT)).metrics.prefill_tokens for chat in (talk, other, talk)]
    assert again == [1, 1, 1]
    assert max(costs) < talk.price(Regenerate()).prompt_tokens


def test_what_is_written_ahead_is_computed_ahead(engine: Engine) -> None:
    chat = engine.chat("Be brief.")
    list(chat.send("hello", SHORT))
    cold = chat.price(Send(TEXT)).tokens
    chat.warm(TEXT[:-10])
    until(lambda: chat.price(Send(TEXT)).tokens < 20)
    assert cold > 200
    metrics = finish(chat.send(TEXT, SHORT)).metrics
    assert metrics.prefill_tokens < 20


def test_what_is_pinned_for_a_prompt_is_pinned_while_it_is_computed_ahead(tiny: Path) -> None:
    with Engine.load(tiny, kv=KVSpec(window=128, keep="system")) as engine:
        chat = engine.chat("Be brief, and never forget who you are. " * 2)
        list(chat.send("hello", SHORT))
        cold = chat.price(Send(TEXT)).tokens
        chat.warm(TEXT[:-10])
        until(lambda: chat.price(Send(TEXT)).tokens < cold // 2)
        warm = finish(chat.send(TEXT, SHORT))
    with Engine.load(tiny, kv=KVSpec(window=128, keep="system"), prompt_cache=None) as engine:
        cold_chat = engine.chat(chat.system, chat.messages[:-2])
        assert finish(cold_chat.send(TEXT, SHORT)).text == warm.text


def test_warming_ahead_gives_way_at_once(engine: Engine) -> None:
    chat = engine.chat()
    long = TEXT * 2  # at 16 tokens a step, as nothing was measured yet
    chat.warm(long)
    metrics = finish(chat.send("hi", SHORT)).metrics
    assert metrics.generated_tokens == 6
    assert chat.price(Send(long)).tokens > 16
    with pytest.raises(OptionError):
        engine.warm_ahead([Message("assistant", "x")])


FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content is defined and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def test_after_thinking_the_visible_answer_is_read_again_in_idle_time(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "thinks", template=FORGETS, thinking=True)
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        said = [Message("user", "why?"), Message("assistant", "because it is so, " * 9, "hm, " * 40)]
        chat = engine.chat(messages=said)
        asked = finish(engine.generate(said[:1], Sampling(temperature=0, max_tokens=80)))
        cold = chat.price(Send("and then?")).tokens
        assert asked.metrics.generated_tokens == 80
        chat._reread()
        until(lambda: chat.price(Send("and then?")).tokens < 40)
        assert cold > 150


def test_a_reply_that_thought_leaves_little_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "thinks", template=FORGETS, thinking=True)
    reread: list[Chat] = []
    monkeypatch.setattr(Chat, "_reread", lambda chat: reread.append(chat))
    with Engine.load(folder, prompt_cache=PromptCacheSpec(disk=False)) as engine:
        chat = engine.chat()
        finish(chat.send("why?", Sampling(temperature=0, max_tokens=20)))
        assert bool(chat.messages[-1].thinking) == bool(reread)
        assert chat.messages[-1].thinking  # its template opens it, and a seeded model never ends it


@pytest.mark.usefixtures("all_worth_storing")
@pytest.mark.parametrize("bits", [None, 4])
def test_what_is_stored_can_be_checked(bits: int | None, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny") if bits is None else write_model(tmp_path / "packed", bits=bits)
    spec = PromptCacheSpec(folder=tmp_path / "cache")
    prompts = [[(5 * number + seed) % 260 for number in range(300 + 50 * seed)] for seed in (0, 1, 2)]
    with Engine.load(tiny, prompt_cache=spec) as engine:
        assert list(engine.check_cache()) == []
        for prompt in prompts:
            list(engine.generate(prompt, SHORT))
            until(lambda: worker_of(engine).call(store_of(engine).idle) is None)
        checks = list(engine.check_cache())
        assert engine.cache_trouble() is None
    assert [check.tokens // 50 * 50 for check in checks] == [400, 350, 300]  # and the reply
    assert max(check.difference for check in checks) < 1e-4
    assert all(check.top_same for check in checks)
    assert len(Folder(tmp_path / "cache").models()) == 1


@pytest.mark.usefixtures("all_worth_storing")
def test_what_is_on_disk_is_read_between_the_tokens_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=2048)
    spec, prompt = PromptCacheSpec(folder=tmp_path / "cache"), [7 * number % 250 for number in range(900)]
    with Engine.load(model, prompt_cache=spec) as engine:
        cold = finish(engine.generate(prompt, SHORT))
        until(lambda: worker_of(engine).call(store_of(engine).idle) is None)
    with Engine.load(model, prompt_cache=spec) as engine:
        engine.tokenizer.eos_ids = frozenset()
        until(lambda: disk_of(store_of(engine)) is not None)
        beside = engine.generate([5, 6, 7], Sampling(temperature=0, max_tokens=1500))
        until(lambda: isinstance(next(beside), TextChunk))
        seen, restore = list[int](), store_of(engine).restore

        def watched(lease: CacheLease, ids: list[int], *_: object) -> Iterator[None]:
            for _ in restore(lease, ids, lambda: 0.0):  # a turn after each segment
                seen.append(replies_of(engine).schedule.live().metrics.generated_tokens)
                yield

        monkeypatch.setattr(store_of(engine), "restore", lambda *given, **_: (each for each in watched(*given)))
        warm = finish(engine.generate(prompt, SHORT))
        beside.close()
    assert warm.text == cold.text
    assert warm.metrics.prefill_tokens == 1
    assert len(seen) >= 3
    assert seen == sorted(set(seen))  # a token of the other's between two of them


def test_where_nothing_can_be_cut_chats_still_share_their_system_prompt(tiny: Path) -> None:
    """With a window every cache is a ring: what can be gone back to is what was marked."""
    system = "You are a helpful assistant who answers in one short sentence. " * 2
    with Engine.load(tiny, kv=KVSpec(window=64), prompt_cache=PromptCacheSpec(disk=False)) as engine:
        first = engine.chat(system)
        list(first.send("one", SHORT))
        list(first.send("two", SHORT))
        second = finish(engine.chat(system).send("else", SHORT)).metrics
        edit = first.price(Edit(2, "another"))
    assert second.cached_tokens > len(system)
    assert edit.tokens < 20


# Whose keys and values are whose: every byte of the weights counts, whatever they are read from.

PROMPT = [int(token) for token in np.random.default_rng(5).integers(10, 200, 400)]


def edit_unseen(file: Path) -> None:
    """Change bytes in the middle of a file, keep its size and the time that programs may set."""
    at = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at.st_size * 3 // 5)
        data = opened.read(400)
        opened.seek(at.st_size * 3 // 5)
        opened.write(bytes(byte ^ 1 for byte in data))
    os.utime(file, ns=(at.st_atime_ns, at.st_mtime_ns))


def answer(model: Path, root: Path) -> Finished:
    with Engine.load(model, prompt_cache=PromptCacheSpec(folder=root)) as engine:
        *_, last = engine.generate(PROMPT, Sampling(temperature=0, max_tokens=4))
        assert isinstance(last, Finished)
        return last


@pytest.mark.usefixtures("all_worth_storing")
def test_a_model_that_differs_in_a_few_bytes_is_another_model(tmp_path: Path) -> None:
    model, other, root = make_tiny(tmp_path / "model"), tmp_path / "other", tmp_path / "prompts"
    shutil.copytree(model, other)
    edit_unseen(other / "model.safetensors")
    assert answer(model, root).metrics.cached_tokens == 0
    assert answer(model, root).metrics.cached_tokens > 250
    assert answer(other, root).metrics.cached_tokens == 0


@pytest.mark.usefixtures("all_worth_storing")
def test_weights_that_are_edited_in_place_are_another_model(tmp_path: Path) -> None:
    model, root = make_tiny(tmp_path / "model"), tmp_path / "prompts"
    answer(model, root)
    edit_unseen(model / "model.safetensors")
    assert answer(model, root).metrics.cached_tokens == 0


def test_a_file_is_read_once_and_one_of_the_hub_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, file = tmp_path / "root", tmp_path / "a.safetensors"
    file.write_bytes(b"weights")
    first = digest([file], root)
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    link = tmp_path / "b.safetensors"
    link.symlink_to(blob)
    monkeypatch.setattr(folder, "_read", lambda _: pytest.fail("read again"))
    assert digest([file], root) == first
    assert digest([link], root) == digest([link], tmp_path / "nowhere")


def test_the_names_and_the_number_of_files_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"same")
    a, b = tmp_path / "a", tmp_path / "b"
    assert len({digest(files, tmp_path / "root") for files in ([a], [b], [a, b], [])}) == 4


@pytest.mark.parametrize("damage", ["[]", "{", '{"1 2": 3}', "\x00"])
def test_a_damaged_memory_of_digests_is_none(tmp_path: Path, damage: str) -> None:
    file, root = tmp_path / "a.safetensors", tmp_path / "root"
    file.write_bytes(b"weights")
    right = digest([file], root)
    (root / FILE).write_text(damage)
    assert digest([file], root) == right
    assert (root / FILE).read_text() != damage


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is too large to be read while one waits."""
    monkeypatch.setattr(folder, "AT_ONCE_BYTES", 3)


@pytest.mark.usefixtures("all_large")
def test_large_files_are_read_beside_and_a_folder_that_can_not_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "root").write_text("a file where a folder should be")
    told: list[str] = []
    thread = identify(tmp_path, tmp_path / "root", told.append)
    thread.join(30)
    assert told == [digest([tmp_path / "model.safetensors"], tmp_path / "other")]


@pytest.mark.usefixtures("all_worth_storing", "all_large")
def test_nothing_is_stored_until_the_weights_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    model, root, go = make_tiny(tmp_path / "model"), tmp_path / "prompts", threading.Event()
    read = folder._read

    def slow(file: Path) -> str:
        assert go.wait(PATIENCE_S)
        return read(file)

    monkeypatch.setattr(folder, "_read", slow)
    with Engine.load(model, prompt_cache=PromptCacheSpec(folder=root)) as engine:
        list(engine.generate(PROMPT, Sampling(temperature=0, max_tokens=4)))
        assert not list(root.rglob("*.kv"))
        go.set()
        for thread in threading.enumerate():
            if thread.name == "tokamac-weights":
                thread.join(30)
    assert list(root.rglob("*.kv"))
    assert answer(model, root).metrics.cached_tokens > 250


# The prompt cache under random use: whatever was said, evicted, stored or damaged before, warm equals cold.


class Conversations(RuleBasedStateMachine):
    """Random trees of conversations: go on, say something else, go back, switch, evict, restart with what is on disk."""

    kind: str

    @initialize(budget=st.sampled_from([LARGE, 200_000, 60_000, 0]), stored=st.sampled_from([LARGE, 100_000]))
    def begin(self, budget: int, stored: int) -> None:
        self.bench = BENCHES[self.kind]
        self.folder = tempfile.TemporaryDirectory()
        self.budget, self.budgets = budget, Budgets(total=stored)
        self.said: list[list[int]] = [[1, 2, 3]]
        self.lanes: list[tuple[CacheLease, list[int]]] = []
        self.restart()

    @rule(
        which=st.integers(0, 40),
        cut=st.integers(0, 70),
        new=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        reply=st.lists(st.integers(0, 3), max_size=6),
        rests=st.booleans(),
    )
    def send(self, which: int, cut: int, new: list[int], reply: list[int], rests: bool) -> None:
        """Continue some conversation, from its end or from anywhere before."""
        base = self.said[which % len(self.said)]
        prompt = [*base[: max(1, len(base) - cut)], *new]
        ask(self.bench, self.store, prompt, reply)
        self.said.append([*prompt, *reply])
        if rests:
            self.rest()

    @rule(which=st.integers(0, 40))
    def again(self, which: int) -> None:
        """Ask for what was said as it was."""
        ask(self.bench, self.store, self.said[which % len(self.said)], [])

    @rule(which=st.integers(0, 40), pieces=st.integers(1, 3))
    def cancel(self, which: int, pieces: int) -> None:
        """Stop in the middle of a prefill."""
        prompt = [*self.said[which % len(self.said)], 3, 2, 1, 0, 3, 2, 1]
        lease = self.store.acquire(prompt, None)
        with lease:
            compute(self.bench.model, lease, prompt[: len(lease.ids) + pieces])
        self.said.append(prompt)

    @rule()
    def restart(self) -> None:
        """End the process, and begin another."""
        self.lanes.clear()
        self.store = self.bench.cache(Folder(Path(self.folder.name), self.budgets), "ef" * 16, self.budget)

    @precondition(lambda self: len(self.lanes) < 3)
    @rule(which=st.integers(0, 40), new=st.lists(st.integers(0, 3), min_size=2, max_size=9))
    def open_lane(self, which: int, new: list[int]) -> None:
        """Begin a reply that runs beside others."""
        prompt = [*self.said[which % len(self.said)], *new]
        lease = self.store.acquire(prompt, None)
        assert lease.ids == prompt[: len(lease.ids)]
        lease.__enter__()
        self.lanes.append((lease, prompt))

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 2), pieces=st.integers(1, 4))
    def read_in_lane(self, which: int, pieces: int) -> None:
        """Read on in a prompt, all but its last token."""
        lease, prompt = self.lanes[which % len(self.lanes)]
        if len(lease.ids) < len(prompt) - 1:
            compute(self.bench.model, lease, prompt[: min(len(prompt) - 1, len(lease.ids) + pieces)])

    @precondition(lambda self: self.lanes)
    @rule(
        which=st.integers(0, 2),
        reply=st.lists(st.integers(0, 3), max_size=6),
        how=st.sampled_from(("end", "rest", "fail")),
    )
    def close_lane(self, which: int, reply: list[int], how: str) -> None:
        """End one of the replies, perhaps after a rest, or by a failure."""
        lease, prompt = self.lanes.pop(which % len(self.lanes))
        if how == "fail":
            lease.__exit__(RuntimeError, None, None)
            return
        if how == "rest":
            held = list(lease.ids)
            self.store.suspend(lease)
            self.again(which)
            self.store.resume(lease, held)
            assert lease.ids == held[: len(lease.ids)]
        if len(lease.ids) < len(prompt) - 1:
            compute(self.bench.model, lease, prompt[:-1])
        self.store.checkpoint(lease)
        found = compute(self.bench.model, lease, prompt)
        assert np.abs(found - self.bench.cold(prompt)).max() < self.bench.tolerance
        if reply:
            compute(self.bench.model, lease, prompt + reply)
        lease.__exit__(None)
        self.said.append([*prompt, *reply])

    @rule(which=st.integers(0, 40), new=st.lists(st.integers(0, 3), min_size=1, max_size=9))
    def resume(self, which: int, new: list[int]) -> None:
        """Rest, end, begin again, and go on with some conversation."""
        self.rest()
        self.restart()
        prompt = [*self.said[which % len(self.said)], *new]
        ask(self.bench, self.store, prompt, [])
        self.said.append(prompt)

    @rule()
    def rest(self) -> None:
        """Have nothing else to do."""
        self.store.flush(10)
        told = self.store.trouble  # one state of some models is larger than the smallest folder: that is said
        assert told is None or (self.budgets.total < 1 << 20 and "exceed the size limit" in told)

    @rule(which=st.integers(0, 40), at=st.integers(0, 1 << 20))
    def damage(self, which: int, at: int) -> None:
        """Flip a bit of some file; and end the process, for what is in memory is not read again."""
        self.restart()
        files = sorted(Path(self.folder.name).rglob("*.kv"))
        if files:
            path = files[which % len(files)]
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= 1 << at % 8
            path.write_bytes(data)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.store.flush(10)
            self.folder.cleanup()

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "store") or not held_of(self.store):
            return
        for held in held_of(self.store):
            self.store._follow(held)
            assert held.lease.ids == held.end.ids()
        on_path = {id(node) for held in held_of(self.store) for node in held.end.path()}
        growing = any(snapshot.grows(cache) for cache in held_of(self.store)[0].lease.caches)
        for node in nodes_of(self.store):
            assert (node.value.piece is None) == (id(node) in on_path) or not growing
        assert self.store.aside == sum(node.value.nbytes for node in nodes_of(self.store))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"BLOCK": 8, "LEAST_TOKENS": 8, "LEAST_TAIL": 2, "PAUSE_S": 0.001}.items():
        monkeypatch.setattr(cache, name, few)
    monkeypatch.setattr(memory, "WORTH_SHARING", 2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_warm_equals_cold_for_random_trees_of_conversations(kind: str) -> None:
    machine = type("Machine", (Conversations,), {"kind": kind})
    case = machine.TestCase
    case.settings = settings(
        max_examples=settings.default.max_examples // 6, stateful_step_count=20, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case().runTest()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_replies_that_hold_the_same_give_it_back_one_after_the_other(kind: str) -> None:
    machine = type("Machine", (Conversations,), {"kind": kind})()
    machine.begin(LARGE, LARGE)
    try:
        for step in range(3):
            machine.open_lane(0, [0, 0])
            machine.again(step)
            machine.is_sound()
        for _ in range(3):
            machine.close_lane(0, [], "end")
            machine.is_sound()
        assert not machine.store.leases
        machine.again(0)
    finally:
        machine.teardown()
