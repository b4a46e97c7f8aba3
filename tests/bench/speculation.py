"""Section speculation: replies with and without guesses, in turn, and what guessing costs a reply that nothing repeats.

What is written is prescribed: a sampler computes its choice as any does, and then takes the next token of a text. So texts that
people have, a file that is quoted or a name that is changed, are measured on models that would not write them.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.bench.limits import LARGER
from tests.bench.plan import Plan, Remote
from tests.bench.report import Row, Section, alternate, at_least, at_most, holds, plain, series
from tests.bench.texts import PROSE
from tests.engine.inside import runner_of, worker_of
from tokamac.engine.events import Message
from tokamac.engine.hub.names import GUIDE, GUIDE_DRAFT
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling, Speculation

NEW = 256
WIDTHS = (1, 2, 4, 8, 16, 32)
# Least speed over plain: the last three where verifying 8 rows takes 2 steps at most.
CASES = {
    "always wrong": 0.97,
    "prose": 0.99,
    "made again, its prompt edited": 1.5,
    "a file quoted": 1.5,
    "code, a name changed": 1.5,
}
DEAR = 2.0


class SpeculationLab:
    """An engine that writes what it is told, with guesses or without."""

    def __init__(self, model: str) -> None:
        import tokamac.engine.reply as replies
        from tests.bench.prescribed import Prescribed
        from tokamac.engine import Engine
        from tokamac.engine.speculation.speculator import SharedSpeculation

        self.engine = Engine.load(model, kv=KVSpec(), prompt_cache=PromptCacheSpec(disk=False))
        self._guide = self.engine if model == "guide" else Engine.load("guide", prompt_cache=None)
        self._replies, self._prescribed = replies, Prescribed
        self._shared: Callable[[Speculation], SharedSpeculation] = partial(SharedSpeculation, remembers=True)
        self._on: dict[str, SharedSpeculation] = {}
        self.engine.tokenizer.eos_ids = frozenset()

    def rows(self) -> dict[int, float]:
        """Return how many plain steps a pass over several rows takes."""
        import mlx.core as mx

        from tokamac.engine.model.head import asking_for_logits

        runtime = runner_of(self.engine).runtime

        def measure() -> dict[int, float]:
            caches = runtime.new_caches(None)
            ids = [5 + i % 50 for i in range(300)]
            runtime.model(mx.array([ids]), cache=caches)
            mx.eval([cache.state for cache in caches])
            taken: dict[int, list[float]] = {width: [] for width in WIDTHS}
            for _ in range(9):
                for width, times in taken.items():
                    began = time.perf_counter()
                    with asking_for_logits():
                        mx.argmax(runtime.model(mx.array([ids[:width]]), cache=caches)[0], axis=-1).tolist()
                    times.append(time.perf_counter() - began)
                    for cache in caches:
                        cache.trim(width)
            return {width: median(times) / median(taken[1]) for width, times in taken.items()}

        return worker_of(self.engine).call(measure)

    def reply(self, case: str, number: int, guesses: bool) -> tuple[float, float | None, str | None]:
        """Write a case's text; return tokens a second, tokens a pass, and why there were no guesses."""
        from tests.engine.speculation.scripted import always_wrong

        prompt, text = self._case(case, number)
        self._replies.Sampler = partial(self._prescribed, text)  # type: ignore[misc,assignment]
        runner = runner_of(self.engine)
        if case not in self._on:
            again = "made again" in case  # else all rounds but the first would be
            self._on[case] = self._shared(Speculation(lookup=case != "always wrong", branches=again))
        shared = self._on[case]
        if case == "always wrong":
            shared.more = lambda: (always_wrong([*prompt, *text], 256),)
        if "made again" in case:  # an earlier version: one word of the prompt, and some of the reply, were others
            shared.forget()
            shared.ended([*self._edited(prompt, 1), *self._edited(text, 3)])
        runner.speculation = shared if guesses else None
        # The prompt is read before: what is timed is decoding.
        end = self.engine.ask(prompt, Sampling(temperature=0, max_tokens=len(text)))
        assert list(end.ids) == list(text)
        metrics = end.metrics
        assert metrics.decode_tps is not None
        passes = metrics.generated_tokens - (metrics.accepted_tokens or 0)
        return metrics.decode_tps, metrics.generated_tokens / passes, metrics.undrafted

    def _case(self, case: str, number: int) -> tuple[list[int], list[int]]:
        encode = self._guide.tokenizer.encode
        if case in {"always wrong", "prose"} or "made again" in case:
            words = PROSE.split(" ")
            begin = 41 * number % len(words)
            ids = encode(" ".join(words[begin:] + words[:begin]))
            return list(islice(cycle(ids), 64)), list(islice(cycle(ids[64:]), min(NEW, len(ids) - 64)))
        source = Path(__file__).with_name("report.py").read_text(encoding="utf-8")
        code = encode(source[300 * number :])[:NEW]
        asked = [*code, *encode("\n\nWrite this again, please.\n\n")]
        if case == "a file quoted":
            return asked, code
        before = re.sub(r"\bstr\b", "text_type", self._guide.tokenizer.decode(code))
        return asked, encode(before)[:NEW]

    def _edited(self, ids: Sequence[int], places: int) -> list[int]:
        """Return ids with some of them others, as an edited text has."""
        edited = list(ids)
        for place in range(places):
            at = (2 * place + 1) * len(edited) // (2 * places)
            edited[at : at + 1] = [edited[at] - 1 if edited[at] else 1, 7][: 1 + place % 2]
        return edited

    def close(self) -> None:
        """Free the models."""
        self.engine.close()
        self._guide.close()


class DraftingLab:
    """The guide with the model that drafts for it, and without, answering what newcomers ask."""

    def __init__(self) -> None:
        from tests.guide.dataset import read_newcomers
        from tokamac.engine import Engine

        draft = Speculation(lookup=False, branches=False, draft=GUIDE_DRAFT)
        self._engines = [Engine.load(GUIDE, prompt_cache=None, speculation=each) for each in (None, draft)]
        self._asked = [entry.turns[0].phrasings[0] for entry in read_newcomers()]

    def reply(self, drafted: bool, number: int) -> tuple[float, int, int, int]:
        """Answer a question; return tokens a second, and the tokens that were made, drafted and accepted."""
        prompt = [Message("user", self._asked[number % len(self._asked)])]
        metrics = self._engines[drafted].ask(prompt, Sampling(temperature=0)).metrics
        assert metrics.decode_tps is not None
        return metrics.decode_tps, metrics.generated_tokens, metrics.drafted_tokens or 0, metrics.accepted_tokens or 0

    def close(self) -> None:
        """Free the models."""
        for engine in self._engines:
            engine.close()


def _drafted(plan: Plan) -> list[Row]:
    """Measure the embedded model with its draft model."""
    with Remote(DraftingLab) as lab:
        for number in range(plan.many_rounds):  # the draft model's worth is known by then
            lab.call("reply", True, number)
        off, on = alternate(plan.most_rounds, *(partial(lab.call, "reply", drafted) for drafted in (False, True)))
    made, guessed, true = (sum(each[at] for each in on) for at in (1, 2, 3))
    return [
        at_least(
            "guide, its draft model: over plain", series([b[0] / a[0] for a, b in zip(off, on, strict=True)]), 0.97
        ),
        Row("guide, its draft model: guesses that came true", f"{true:,} of {guessed:,}, in {made:,} tokens"),
    ]


def measure_speculation(plan: Plan) -> Section:
    """Measure every case on the embedded model and on a larger, seeded one."""
    from tests.engine.helpers import write_model

    rows: list[Row] = []
    with TemporaryDirectory(prefix="tokamac-seeded-") as folder:
        larger = write_model(Path(folder) / "larger", bits=4, **LARGER)
        for name, model in (("guide", plan.model), ("88 M weights", str(larger))):
            with Remote(SpeculationLab, model) as lab:
                rows += _measured(name, lab, plan)
    rows += _drafted(plan)
    how = (
        f"The same reply, up to {NEW} tokens, with guesses and without, in turn, on one engine; ratios are of decode rates. What "
        "is written is prescribed, as a model of seeded weights would not write it; the steps are computed all the same. A reply "
        "made again has one token of its prompt and three of its text changed, code a name. A pass over several rows is timed "
        f"alone, over one of one row; where 8 rows take more than {DEAR:g} steps, no gain is aimed at. With its draft "
        "model the guide answers what newcomers ask, in its own words."
    )
    return Section("Speculation: guesses verified in one pass", rows, how)


def _measured(name: str, lab: Remote, plan: Plan) -> list[Row]:
    costs = lab.call("rows")
    shown = ", ".join(f"{width}: {cost:.2f}" for width, cost in costs.items())
    rows = [Row(f"{name}: a pass over rows, in steps", shown)]
    for case, least in CASES.items():
        lab.call("reply", case, 0, True)
        rounds = plan.most_rounds if least <= 1 else plan.many_rounds
        off, on = alternate(rounds, *(partial(_reply, lab, case, guesses) for guesses in (False, True)))
        pairs = [with_tps / plain_tps for (plain_tps, _, _), (with_tps, _, _) in zip(off, on, strict=True)]
        over, what = series(pairs), f"{name}: {case}, over plain"
        aimed = least <= 1 or costs[8] <= DEAR
        rows.append(at_least(what, over, least) if aimed else plain(what, over))
        rows.append(plain(f"{name}: {case}, tokens a pass", series([each[1] for each in on])))
    return rows


def _reply(lab: Remote, case: str, guesses: bool, number: int) -> tuple[float, float, str | None]:
    found: tuple[float, float, str | None] = lab.call("reply", case, number % 4, guesses)
    return found


# Section: what a lookup takes.


def measure_lookup(plan: Plan) -> Section:
    """Time the index at 100,000 tokens, and count its bytes."""
    import numpy as np

    from tokamac.engine.speculation.drafters import Lookup
    from tokamac.engine.speculation.speculator import GUESSES

    count = plan.count(100_000, 100_000)
    rng = np.random.default_rng(0)
    words = rng.zipf(1.3, count) % 30_000
    texts = {"words by Zipf's law": words.tolist(), "one token again and again": [7] * count,
             "16 tokens at random": rng.integers(0, 16, count).tolist()}  # fmt: skip
    rows = []
    for what, ids in texts.items():
        times, size = [], 0.0
        for _ in range(plan.rounds):
            lookup, known = Lookup(), list(ids[: count - 2000])
            began = time.perf_counter()
            lookup.propose(known, GUESSES)
            built_s = time.perf_counter() - began
            began = time.perf_counter()
            for token in ids[count - 2000 :]:
                known.append(token)
                lookup.propose(known, GUESSES)
            times.append(((time.perf_counter() - began) / 2000 + built_s / count) * 1e6)
            size = lookup.nbytes / len(known)
        rows.append(at_most(f"{what}: a token", series(times), 20, "µs"))
        rows.append(holds(f"{what}: index", f"{size:.1f} bytes a token", "≤ 40", met=size <= 40))
    how = (
        f"Looking up with {count:,} tokens behind, on the host: the last 2,000, each with a guess of {GUESSES}, and a share of the "
        "index."
    )
    return Section("Speculation: looking up", rows, how)
