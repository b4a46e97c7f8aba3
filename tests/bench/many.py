"""Sections together and each: many replies at once, through the command line, beside one at a time and beside mlx-lm's batches."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.limits import LARGER
from tests.bench.plan import BenchError, Plan
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, holds, plain, ratios, series
from tests.bench.texts import QUESTIONS

PROMPT = 32
WIDTHS = (1, 4, 8)
PACKED = "8,4"
LARGE = "88 M weights"
NEW = {"guide": 96, LARGE: 32}


@contextmanager
def _models(plan: Plan) -> Iterator[dict[str, str]]:
    """Yield the models to measure, by what the rows call them: the embedded one, and a larger, seeded one."""
    from tests.engine.helpers import write_model

    with TemporaryDirectory(prefix="tokamac-seeded-") as folder:
        yield {"guide": plan.model, LARGE: str(write_model(Path(folder) / "larger", bits=4, **LARGER))}


def measure_together(plan: Plan) -> Section:
    """Decode at several widths: over one reply, over mlx-lm at the same width, and packed over 16 bits."""
    with _models(plan) as models:
        rows = [row for name, model in models.items() for row in _together(plan, name, model)]
    how = (
        f"`tokamac bench --parallel`: {NEW['guide']} tokens, {NEW[LARGE]} of the larger model, after prompts of {PROMPT}, all "
        "asked for at the same instant; tokens a second of all replies, over the time in which all of them are written. mlx-lm's "
        "`BatchGenerator`, which its `batch_generate` drives, answers the same prompts in turn in a process of its own, the larger "
        "model's once. It refuses packed keys and values in a batch."
    )
    return Section("Together: several replies at once", rows, how)


def _together(plan: Plan, name: str, model: str) -> list[Row]:
    new = plan.count(NEW[name], 24)  # long enough that the last prompt is read before the first reply ends
    flags = ("--prompt", str(PROMPT), "--max-tokens", str(new), "--parallel", ",".join(map(str, WIDTHS)))
    runs = plan.count(3, 1) if name == "guide" else 1  # mlx-lm takes minutes for the larger one
    beside = _bench(model, *flags, "--runs", str(runs), "--compare", "mlx-lm")
    rows: list[Row] = []
    alone = _rates(beside[1]["runs"])
    for width in WIDTHS:
        ours, theirs = _rates(beside[width]["runs"]), _rates(beside[width]["peer"]["runs"])
        rows.append(plain(f"{name}: {width} at once, all together", ours, "tok/s"))
        if width > 1:
            rows.append(plain(f"{name}: {width} at once ÷ one", ratios(ours, alone)))
        rows.append(at_least(f"{name}: {width} at once ÷ mlx-lm's batch", ratios(ours, theirs), 1.0))
    whole, packed = alternate(
        plan.rounds,
        lambda _: _bench(model, *flags, "--runs", "1"),
        lambda _: _bench(model, *flags, "--runs", "1", "--kv-bits", PACKED),
    )
    for width in WIDTHS[1:]:
        sixteen, few = (series([_rates(run[width]["runs"]).median for run in runs]) for runs in (whole, packed))
        rows.append(at_least(f"{name}: {width} at once, KV {PACKED} ÷ 16 bits", ratios(few, sixteen), 0.9))
    return rows


def _bench(model: str, *flags: str) -> dict[int, dict[str, Any]]:
    """Return what ``tokamac bench`` measured, by width."""
    done = _tokamac("bench", model, *flags, "--json")
    return {row["width"]: row for row in json.loads(done)["parallel"]}


def _rates(runs: list[dict[str, Any]]) -> Series:
    return series([run["together_tps"] for run in runs])


# Section: a file of prompts.

PROMPTS = 64


def measure_each(plan: Plan) -> Section:
    """Answer a file of prompts eight at once and one by one."""
    new, count = plan.count(64, 8), plan.count(PROMPTS, 8)
    with _models(plan) as models, TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("".join(f"{QUESTIONS[i % len(QUESTIONS)]} ({i})\n" for i in range(count)))
        rows = [
            row for name, model in models.items() for row in _each(plan, name, partial(_answered, model, prompts, new))
        ]
    how = (
        f"`tokamac ask --each` with `--parallel 8` and `--parallel 1`, in turn, {count} prompts: the whole command, loading "
        f"included; {new} tokens at most for each prompt, at temperature 1 with a seed."
    )
    return Section("Each: a file of prompts", rows, how)


def _each(plan: Plan, name: str, answer: Callable[[int], tuple[float, list[str]]]) -> list[Row]:
    together, one_by_one = alternate(plan.count(3, 1), lambda _: answer(8), lambda _: answer(1))
    texts = [found[1] for found in (*together, *one_by_one)]
    times = [series([found[0] for found in side]) for side in (together, one_by_one)]
    same = all(each == texts[0] for each in texts)
    return [
        plain(f"{name}: eight at once", times[0], "s"),
        plain(f"{name}: one by one", times[1], "s"),
        at_most(f"{name}: eight at once ÷ one by one", ratios(*times), 0.5),
        holds(f"{name}: answers", "the same" if same else "other ones", "the same", met=same),
    ]


def _answered(model: str, prompts: Path, new: int, parallel: int) -> tuple[float, list[str]]:
    """Return the seconds of a whole command, and its answers."""
    began = time.monotonic()
    flags = ("--max-tokens", str(new), "--temp", "1", "--seed", "1", "--no-prompt-cache")
    out = _tokamac("ask", "--each", str(prompts), "-m", model, "--parallel", str(parallel), *flags)
    return time.monotonic() - began, [json.loads(line)["text"] for line in out.splitlines()]


def _tokamac(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tokamac.app.cli", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    if done.returncode:
        raise BenchError(done.stderr.strip() or f"tokamac {arguments[0]} ended with status {done.returncode}")
    return done.stdout
