"""Sections real, real_chats and real_conversions: on models that people use, where `make models` has fetched them."""

import inspect
import shutil
import statistics
import tempfile
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.plan import EngineServer, Plan, Remote, Timing
from tests.bench.prompt_cache import NEW, PREFIX, Asked, PromptLab
from tests.bench.report import Row, Section, alternate, holds, plain, series
from tests.real.loops import PARALLEL as PARALLEL_TALKS
from tests.real.loops import false_alarms, talks
from tests.real.loops import texts as loop_texts
from tests.real.models import MODELS, SMOLLM2, RealModel
from tokamac.engine import Engine, PromptCacheSpec, Sampling

# Section: how fast a real model is beside the guide.

PROMPT = 512


def measure_real(plan: Plan) -> Section:
    """Decode, prefill and time to the first token, cold and warm, of SmolLM2 and of the guide in turn."""
    new, names = plan.count(128, 16), ("guide", "SmolLM2")
    models = ("guide", str(SMOLLM2.converted))
    with Remote(EngineServer, models[0]) as guide, Remote(EngineServer, models[1]) as smollm2:
        sides = (guide, smollm2)
        for side in sides:
            side.call("reply", side.call("prompt", 32, 0), 4)
        replies = alternate(plan.rounds, *(partial(_reply, side, new) for side in sides))
    rows: list[Row] = []
    for figure, what in (("decode_tps", "decode"), ("prefill_tps", f"prefill of {PROMPT} tokens")):
        rows += [
            plain(f"{what}: {name}", series([getattr(each, figure) for each in timed]), "tok/s")
            for name, timed in zip(names, replies, strict=True)
        ]
    for name, model in zip(names, models, strict=True):
        with Remote(PromptLab, model, None) as lab:
            cold, warm = alternate(plan.rounds, partial(_ask, lab, 0), partial(_ask, lab, 1))
        rows += [
            plain(f"time to the first token, nothing cached: {name}", series([each.ttft_s for each in cold]), "s"),
            plain(f"the same, all but {NEW} tokens cached: {name}", series([each.ttft_s for each in warm]), "s"),
        ]
    how = (
        "SmolLM2-135M-Instruct, converted to 4 bits throughout (`make models`), and the embedded guide, in turn. Decode: "
        f"{new} tokens at temperature 0 after a prompt of {PROMPT}; nothing cached, nothing guessed. First token: prompts of "
        f"{PREFIX + NEW:,} tokens, each new in its round, then again with another ending; the cache is in memory."
    )
    return Section("A real model beside the guide", rows, how)


def _reply(side: Remote, new: int, number: int) -> Timing:
    timing: Timing = side.call("reply", side.call("prompt", PROMPT, number), new)
    return timing


def _ask(lab: Remote, ending: int, number: int) -> Asked:
    asked: Asked = lab.call("ask", number, ending)
    return asked


# Section: whether conversations end well.

CONVERSATIONS = 40


def measure_real_chats(plan: Plan) -> Section:
    """Have conversations on SmolLM2: how replies end, and whether a chat fills up; and what is taken for a loop and is none."""
    with Remote(ChatLab, str(SMOLLM2.converted)) as lab:
        characters, alarms = lab.call("false_alarms")
        found: Ends = lab.call("talk", plan.count(CONVERSATIONS, 2))
    rows = [
        holds(
            f"false alarms of a loop on {characters:,} characters of code, tables and lists",
            f"{alarms}",
            "none",
            met=not alarms,
        ),
        holds(
            f"{found.chats} conversations of 6 turns: full at their end", f"{found.full}", "none", met=not found.full
        ),
        holds("replies that the context cut", f"{found.cut}", "none", met=not found.cut),
        Row(f"how {found.replies} replies ended", found.said),
        Row("tokens of a reply", f"median {statistics.median(found.lengths):,.0f}, most {max(found.lengths):,}"),
    ]
    how = (
        "SmolLM2-135M-Instruct at 4 bits (`make models`) with the product's default settings: ten talks of six turns, each with "
        "several seeds, eight in parallel. Its files name no sampling, so the product's own defaults hold. Counts, so one run."
    )
    return Section("Conversations on a real model", rows, how)


@dataclass(frozen=True)
class Ends:
    """How the replies of some conversations ended. full: chats without room for a turn; cut: replies that the context ended."""

    chats: int
    full: int
    cut: int
    reasons: Counter[str]
    lengths: tuple[int, ...]

    @property
    def replies(self) -> int:
        """All of them."""
        return len(self.lengths)

    @property
    def said(self) -> str:
        """The reasons in words."""
        return ", ".join(
            f"{reason} {count} ({count / self.replies:.0%})" for reason, count in self.reasons.most_common()
        )


class ChatLab:
    """A loaded engine that conversations are had with."""

    def __init__(self, model: str) -> None:
        self._engine = Engine.load(model, prompt_cache=PromptCacheSpec(disk=False), parallel=PARALLEL_TALKS)

    def false_alarms(self) -> tuple[int, int]:
        """Return the characters of a text of real files, and how often it would be ended for a loop."""
        text = loop_texts()
        return len(text), false_alarms(self._engine.tokenizer, text)

    def talk(self, conversations: int) -> Ends:
        """Have the first so many conversations."""
        done = list(talks(self._engine, range(conversations), Sampling()))
        context, replies = self._engine.spec.context_length, [reply for each in done for reply in each.replies]
        return Ends(
            chats=len(done),
            full=sum(context is not None and each.context >= context for each in done),
            cut=sum(reply.cut_by == "context" for reply in replies),
            reasons=Counter(reply.reason for reply in replies),
            lengths=tuple(reply.metrics.generated_tokens for reply in replies),
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


# Section: what conversions lose, on text that people write.

TOKENS = 4096
CONVERSIONS: dict[str, dict[str, Any]] = {
    "rounded, as mlx_lm.convert": {"method": "round"},
    "default": {},
    "default, embedding at 4 bits": {"embed_bits": 4},
    "the same, errors weighed by no text": {"embed_bits": 4, "calibration": "none"},
    "groups of 32": {"group_size": 32},
    "GPTQ": {"method": "gptq"},
}
SLOW: dict[str, dict[str, Any]] = {
    "AWQ": {"method": "awq"},
    "5 bits in the mean, by layer": {"target_bpw": 5.0},
}


def measure_real_conversions(plan: Plan) -> Section:
    """Convert each real model in several ways, and compare each result with its source on text of some length."""
    ways = CONVERSIONS | (SLOW if plan.patient else {})
    tokens = plan.count(TOKENS, 256)
    rows: list[Row] = []
    for model in (model for model in MODELS if model.hf.is_dir()):
        with Remote(ConversionLab, str(model.hf)) as lab:
            for name, options in list(ways.items())[: plan.count(len(ways), 2)]:
                rows.append(_conversion_row(model, name, lab.call("measure", options, tokens)))
    how = (
        f"`tokamac.quant.convert` to 4 bits unless it says otherwise, then `quality` over {tokens:,} tokens: half of them "
        "English about Python (`pydoc_data.topics`), half Python (the standard library's `textwrap`). KL in nats a token; "
        "top word: how often both models' likeliest next token is the same; perplexity against the unpacked model's. "
        "Calibration is the text that ships. Time is that of the conversion alone, its own "
        "comparison left out. SmolLM2's and Gemma's own weights were packed once before they were published, so what is "
        "measured is the loss against the unpacked file. `--patient` adds the ways that take most of an hour."
    )
    return Section("Conversions of real models", rows, how)


class ConversionLab:
    """Converts one model, in a process of its own."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._folder = Path(tempfile.mkdtemp(prefix="tokamac-bench-"))
        self._text = judged_text()

    def measure(self, options: Mapping[str, Any], tokens: int) -> dict[str, float | None]:
        """Return bits per weight, seconds, and the figures of the comparison."""
        from tokamac.quant import convert, quality

        made = convert(self._source, self._folder / "made", overwrite=True, verify=False, **options)
        found = quality(made.path, self._source, self._text, tokens=tokens, window=1024)
        figures = {name: getattr(found, name) for name in ("kl", "top1", "perplexity_ratio", "reference_perplexity")}
        return figures | {"bits": made.bits_per_weight, "seconds": made.seconds}

    def close(self) -> None:
        """Remove what was made."""
        shutil.rmtree(self._folder)


def judged_text() -> str:
    """Return the text that models are compared on, which comes with every Python."""
    from pydoc_data.topics import topics

    half = TOKENS * 2  # characters, some four a token
    return "\n".join(text for _, text in sorted(topics.items())[::4])[:half] + inspect.getsource(textwrap)[:half]


def _conversion_row(model: RealModel, name: str, found: Mapping[str, float]) -> Row:
    value = (
        f"{found['bits']:.3f} bits, KL {found['kl']:.4f}, top word {found['top1']:.1%}, "
        f"perplexity {found['perplexity_ratio'] - 1:+.1%} (of {found['reference_perplexity']:.2f}), {found['seconds']:.0f} s"
    )
    return Row(f"{model.name}: {name}", value)
