"""``python -m tests.bench``: measure, and write BENCHMARKS.md.

Exits 1 when something could not be measured. A missed target is a result, and shown.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.report import Section

ROOT = Path(__file__).parents[2]
SECTIONS = {  # section: its module
    "limits": "limits",
    "mac": "mac",
    "peak": "limits",
    "decode": "decode",
    "live_cost": "decode",
    "peer": "decode",
    "cpu": "cpu",
    "together": "many",
    "each": "many",
    "load": "load",
    "soak": "load",
    "serve": "serve",
    "waiting": "waiting",
    "soak_serve": "waiting",
    "screen": "screen",
    "chat_screen": "screen",
    "chat_use": "screen",
    "start": "screen",
    "turns": "decode",
    "prompt_cache": "prompt_cache",
    "kv": "kv",
    "flat": "decode",
    "store": "screen",
    "speculation": "speculation",
    "lookup": "speculation",
    "search": "convert",
    "convert": "convert",
    "vision": "vision",
    "real": "real",
    "real_chats": "real",
    "real_conversions": "real",
    "real_gguf": "gguf",
}
LONG = (
    "soak_serve",
    "real_chats",
    "real_conversions",
    "real_gguf",
)  # `make soak` and `make bench-real` alone: an hour and more


def main() -> int:
    """Run the sections that are asked for; return the exit status."""
    options = _options()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    from tests.bench import machine
    from tests.bench.plan import make_plan

    cache = TemporaryDirectory(prefix="tokamac-bench-", ignore_cleanup_errors=True)
    os.environ["TOKAMAC_CACHE_DIR"] = cache.name  # nothing is found that another run left
    try:
        plan = make_plan(options.model, quick=options.quick, patient=options.patient)
        facts = [*machine.facts(), ("model", plan.described), ("MLX computes on", plan.device)]
        blocks: list[str] = []
        for name in options.only or _present(
            LONG[1:] if options.real else [name for name in SECTIONS if name not in LONG]
        ):
            blocks.append(_measured(name, lambda measure: measure(plan), quick=plan.quick))
            _write(options, blocks, facts)  # what is measured is not lost with what comes after it
    except Exception as error:
        if options.debug:
            raise
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        print(f"benchmarks: {reason[0]} (--debug shows where)", file=sys.stderr)
        return 1
    finally:
        cache.cleanup()
    return 0


def _present(names: Iterable[str]) -> list[str]:
    """Leave out what needs a real model, where there is none."""
    from tests.real.models import SMOLLM2

    if SMOLLM2.converted.is_dir():
        return list(names)
    print("benchmarks: no real model is here (make models), so its sections are left out", file=sys.stderr)
    return [name for name in names if not name.startswith("real")]


def _write(options: argparse.Namespace, blocks: list[str], facts: list[tuple[str, str]]) -> None:
    """Print the page, or write it. Small counts never replace what a whole run wrote, unless that is said."""
    from tests.bench.report import merged, page

    target = options.output or (None if options.quick else ROOT / "BENCHMARKS.md")
    if target is None:
        print(page(blocks[-1:], facts))
        return
    old = target.read_text(encoding="utf-8") if (options.only or options.real) and target.exists() else ""
    target.write_text(merged(old, blocks, facts), encoding="utf-8")
    print(f"benchmarks: wrote {target}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure, and write BENCHMARKS.md.")
    parser.add_argument("--model", default=os.environ.get("TOKAMAC_BENCH_MODEL", "guide"), help="folder, id, or guide")
    parser.add_argument(
        "--only",
        action="append",
        choices=SECTIONS,
        help="measure this section again (may be repeated), and leave the others",
    )
    parser.add_argument("--real", action="store_true", help="the long sections on real models, and leave the others")
    parser.add_argument("--quick", action="store_true", help="small counts, to try the script; printed, not written")
    parser.add_argument(
        "--patient", action="store_true", help="five rounds of the slowest peer, too: several minutes more"
    )
    parser.add_argument("--output", type=Path, help="write here, whatever was measured")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    return parser.parse_args()


def _measured(name: str, run: Callable[[Callable[..., Section]], Section], *, quick: bool) -> str:
    from tests.bench.machine import moment
    from tests.bench.report import block

    began, when = time.monotonic(), moment()
    print(f"benchmarks: {name} …", file=sys.stderr, flush=True)
    section = run(getattr(import_module(f"tests.bench.{SECTIONS[name]}"), f"measure_{name}"))
    for row in section.rows:
        print(f"  {row.what}: {row.value} {row.target} {row.verdict}".rstrip(), file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(f"  {took:.0f} s", file=sys.stderr, flush=True)
    note = ", with small counts: noise" if quick else ""
    return block(section, f"*Measured {when}; it took {took / 60:.1f} minutes{note}.*")


if __name__ == "__main__":
    sys.exit(main())
