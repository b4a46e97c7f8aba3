"""``tokamac ask``: one answer, streamed to stdout.

stdout carries the answer alone (or JSON lines); progress, metrics and the model's thinking go to stderr. Thinking is shown, faint,
only where stderr is a terminal: in a script it would be noise.

The prompt of ``tokamac ask``: the files, what is piped in, each in a block of its own, and then the question.

The question comes last, so that another one about the same file begins with what is computed already.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import (
    Event,
    Finished,
    MemoryPressure,
    Message,
    PrefillProgress,
    TextChunk,
    ToolCall,
    Truncated,
)
from tokamac.engine.files import NotRegularError, open_regular
from tokamac.engine.hub.cache import GUIDE
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions
from tokamac.engine.passes.tokens import StepTokens

from .. import INTERRUPTED, settings
from ..backend.protocol import LookedAt
from ..chat.attachments import AttachError, PDFError, decoded, fence_for, kind_of, pdf_text
from ..guide import offer
from ..keep_awake import awake
from ..options import (
    adapter_of,
    add_adapter_flag,
    add_kv_flags,
    add_logprobs_flag,
    add_memory_flag,
    add_model_flag,
    add_profile_flag,
    add_sampling_flags,
    add_template_flags,
    add_unchecked_flag,
    default_model,
    given_profile,
    kv_spec,
    memory_limit,
    over,
    prompt_cache,
    sampling,
    template_options,
    warn,
    with_logprobs,
)
from ..output import ModelText, Progress, dim, is_terminal, json_line, note
from ..parser import Parser
from ..profiles import Profile
from ..sanitise import Sanitiser
from ..tools import callers
from . import loading

if TYPE_CHECKING:
    from tokamac.engine import Engine

STDIN = "-"

HANDED_OVER = (Path("/dev/fd"), Path("/proc/self/fd"))

LONGEST_INPUT = 64_000_000
"""Bytes of a file or a pipe; a context of a million tokens is about 5 MB of text."""


class InputError(TokamacError):
    """A file or standard input can't be used as text."""


def compose(argument: str | None, files: Sequence[str]) -> str:
    """Return the whole prompt; "" when there is nothing to ask.

    A pipe is read whether or not ``-`` stands for it. Raises InputError for what is missing, unreadable or not text.
    """
    piped = _standard_input(wanted=argument == STDIN)
    said = "" if argument is None or argument == STDIN else argument.strip()
    blocks = [_block(f"File {name}:", _read_file(name)) for name in files]
    if piped.strip():
        # Alone it is the prompt itself; beside one it is what the prompt is about.
        blocks.append(_block("Input:", piped) if said or blocks else piped.strip())
    return "\n\n".join([*blocks, said] if said else blocks)


def _standard_input(*, wanted: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not wanted):
        return ""
    buffer = getattr(sys.stdin, "buffer", None)
    return _text(buffer.read(LONGEST_INPUT + 1), "standard input") if buffer is not None else sys.stdin.read()


def _read_file(name: str) -> str:
    try:
        path = Path(name).expanduser()
        with path.open("rb") if _is_handed_over(path) else open_regular(path) as file:
            return _text(file.read(LONGEST_INPUT + 1), name)
    except NotRegularError as error:
        raise InputError(
            f"{name} can't be read: {error.strerror}", f"Pipe it in instead: tokamac ask PROMPT < {name}"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{name} is a folder", "Name the files in it, each with -f.") from error
    except FileNotFoundError as error:
        raise InputError(f"there is no file {name}", "Check the path given to -f.") from error
    except OSError as error:
        raise InputError(
            f"{name} can't be read: {error.strerror}", access_hint(error, "Check its permissions.")
        ) from error


def _is_handed_over(path: Path) -> bool:
    """Whether a path is a descriptor that this process was started with, as a shell's ``<(command)`` is: somebody writes to it."""
    return path.parent in HANDED_OVER or path == Path("/dev/stdin")


def _text(data: bytes, name: str) -> str:
    if len(data) > LONGEST_INPUT:
        raise InputError(
            f"{name} has more than {LONGEST_INPUT // 10**6} MB", "No context holds that: give a part of it."
        )
    try:
        return pdf_text(data) if kind_of(name) == "pdf" else decoded(data, name)
    except PDFError as error:
        raise InputError(f"{name} can't be read: {error.message}", error.hint) from error
    except AttachError as error:
        raise InputError(error.message, "Only text can be read; convert it first.") from error


def _block(title: str, text: str) -> str:
    """Return text under its title, fenced by more backticks than it holds in a row, so that it can't end its own block."""
    fence = fence_for(text)
    return f"{title}\n{fence}\n{text.strip(chr(10))}\n{fence}"


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "ask",
        "Stream one answer to stdout. PROMPT comes first, then the files, then what is piped in. "
        "A model's thinking goes to stderr, where that is a terminal.",
        '  tokamac ask "Why is decode memory-bound?"\n'
        '  git diff | tokamac ask "Review this"\n'
        '  tokamac ask "What do these do?" -f app/cli.py -f app/output.py --json',
    )
    made.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask; - or nothing reads standard input")
    add_model_flag(made)
    made.add_argument("-f", "--file", action="append", default=[], metavar="FILE", help="a text file; may be repeated")
    made.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_profile_flag(made, "none")
    made.add_argument(
        "--json", action="store_true", help="events as JSON lines: truncated, squeezed, prefill, text, finished, error"
    )
    made.add_argument(
        "--tools",
        metavar="NAMES",
        default="",
        help="tools and MCP servers that the model may call, split by commas (tokamac help tools)",
    )
    made.add_argument("--allow-tools", action="store_true", help="run their calls without asking")
    add_logprobs_flag(made)
    made.add_argument(
        "--steps",
        metavar="FILE",
        help="write the steps of the reply as JSON lines: times, bytes and the likely tokens of each; - is stderr",
    )
    made.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="metrics and a diagnosis, to stderr; -vv: the whole diagnosis, with its formulas and the numbers put in",
    )
    add_adapter_flag(made)
    add_unchecked_flag(made)
    add_sampling_flags(made)
    add_template_flags(made)
    add_kv_flags(made)
    add_memory_flag(made)
    return made


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    """Answer, and return the exit status."""
    profile = _profile(parser, options)
    wanted = with_logprobs(parser, options, sampling(parser, options, over(parser, profile, Sampling())))
    kv = kv_spec(parser, options, over(parser, profile, KVSpec()))
    template = template_options(parser, options, over(parser, profile, TemplateOptions()))
    prompt = compose(options.prompt, options.file)
    if not prompt:
        parser.error('the prompt is empty; give one, as in tokamac ask "Why is the sky blue?", or pipe text in')
    messages = [Message("user", prompt)]
    if system := profile.system if options.system is None else options.system:
        messages.insert(0, Message("system", system))
    options.model = options.model or profile.model
    options.tools = options.tools or ",".join(profile.tools or ())
    with callers.open_tools(parser, options) as tools:
        return _answer(options, messages, wanted, (kv, template), tools)


def _profile(parser: Parser, options: argparse.Namespace) -> Profile:
    """Return the profile that was asked for; an empty one where none was. Raises ModelNotFoundError."""
    if options.profile is None:
        return Profile()
    read = settings.load(settings.default_path())
    if options.model is not None:  # else the model is looked up, which says them
        warn(read.warnings)
    found = given_profile(parser, options.profile, read.settings.profiles)
    if options.model is None:
        from ..chat.models import require

        require(found.model or "", options.profile, "tokamac models pull")
    return found


def _answer(
    options: argparse.Namespace,
    messages: list[Message],
    wanted: Sampling,
    how: tuple[KVSpec, TemplateOptions],
    tools: callers.AskTools,
) -> int:
    kv, template = how
    writer = JsonWriter() if options.json else TextWriter(verbose=options.verbose)
    model = options.model or default_model()
    try:
        engine = loading.load(
            model,
            kv=kv,
            prompt_cache=prompt_cache(options),
            memory=memory_limit(options),
            on_interrupt=writer.interrupted,
            unchecked=options.unchecked,
            adapter=adapter_of(options, model),
        )
        with engine:
            told, near_to = replace(template, tools=tools.specs), messages[-1].content if model == GUIDE else ""
            while True:
                with loading.interrupting(engine.cancel):
                    end = write_reply(engine.generate(messages, wanted, template=told), writer, near_to=near_to)
                if end is None or not end.tool_calls or end.reason == "cancelled" or tools.exhausted:
                    break
                messages = [
                    *messages,
                    Message("assistant", end.text, end.thinking, end.tool_calls),
                    *tools.answer(end.tool_calls),
                ]
            if end is not None and options.steps is not None:
                with loading.interrupting(engine.cancel):
                    write_steps(engine, messages, end, options.steps, told)
            if end is None or end.reason == "cancelled":
                return INTERRUPTED
            if end.tool_calls:  # it was told that it may make no more, and goes on calling
                note(f"stopped without an answer: the model made more than {tools.most} calls")
                return 1
            return 0
    except KeyboardInterrupt:
        writer.interrupted()
        raise
    finally:
        writer.close()


def write_steps(
    engine: "Engine", messages: Sequence[Message], end: Finished, name: str, template: TemplateOptions
) -> None:
    """Write each step of the reply on a line of the file ``name``, or of stderr. Raises InputError where it can't be written."""
    from ..chat.conversation import Reply
    from ..reply_steps import ReplySteps

    steps, metrics = ReplySteps(Reply(end.text, end.thinking, metrics=end.metrics, passes=end.passes)), end.metrics
    bar = Progress("computing the likely tokens", unit="tokens", plain=False)
    told = engine.look_again(
        messages,
        Message("assistant", end.text, end.thinking),
        passes=end.passes,
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        template=template,
    )
    for event in told if end.reason != "cancelled" else ():  # whoever interrupts does not want more computed
        match event:
            case StepTokens():
                steps.take(LookedAt(0, tokens=event))
            case PrefillProgress(done, total):
                bar.update(done, total)
    bar.clear()
    try:
        with nullcontext(sys.stderr) if name == STDIN else Path(name).expanduser().open("w", encoding="utf-8") as file:
            for index in range(len(steps)):
                file.write(json.dumps(steps.record(index)) + "\n")
    except OSError as error:
        raise InputError(
            f"{name} can't be written: {error.strerror}", access_hint(error, "Check its folder.")
        ) from error


def write_reply(events: Iterator[Event], writer: "JsonWriter | TextWriter", *, near_to: str = "") -> Finished | None:
    """Write the events of a reply as they come; return its end, None where there is none.

    near_to: what the guide was asked: where it declines, the nearest questions that it can answer are written too.
    """
    end = None
    for event in events:
        if isinstance(event, PrefillProgress):
            writer.prefill(event)
        elif isinstance(event, TextChunk):
            writer.text(event)
        elif isinstance(event, Truncated):
            writer.truncated(event)
        elif isinstance(event, MemoryPressure):
            writer.squeezed(event)
        elif isinstance(event, ToolCall):
            writer.called(event)
        else:
            end = event
            more = offer(near_to, event.text) if near_to and event.reason == "stop" else ""
            if more:
                writer.text(TextChunk(more))
            writer.finished(replace(event, text=event.text + more) if more else event)
    return end


class TextWriter:
    """The answer for a person, or for a pipe."""

    def __init__(self, *, verbose: int) -> None:
        self._verbose = verbose
        self._answer = ModelText(sys.stdout)
        self._bar = Progress("reading the prompt", unit="tokens", plain=False)
        self._thinking = Sanitiser() if is_terminal(sys.stderr) else None
        self._thought = False

    def prefill(self, event: PrefillProgress) -> None:
        """Show how much of the prompt is read."""
        self._bar.update(event.done, event.total)

    def truncated(self, event: Truncated) -> None:
        """Say what of the prompt the model does not see."""
        note(f"note: the prompt does not fit the context; {event.tokens:,} tokens of its middle were left out")

    def squeezed(self, event: MemoryPressure) -> None:
        """Say what was done where memory was short."""
        from ..verdict import pressure_sentence

        note(f"note: {pressure_sentence(event)}")

    def called(self, event: ToolCall) -> None:  # noqa: ARG002  # as JsonWriter
        """Leave the line of the answer: what comes of the call is told when it is answered."""
        self._bar.clear()
        self._end_thinking()
        self._answer.end()

    def text(self, event: TextChunk) -> None:
        """Write a piece of the reply."""
        self._bar.clear()
        if event.kind == "answer":
            self._end_thinking()
            self._answer.write(event.text)
        elif self._thinking:
            self._thought = True
            sys.stderr.write(dim(self._thinking.feed(event.text)))
            sys.stderr.flush()

    def finished(self, event: Finished) -> None:
        """End the last line; on request say what was measured."""
        self.close()
        for doubt in event.doubts:
            note(f"unchecked: {doubt}; this text may be wrong")
        if event.thinking_ended_at is not None:
            from ..chat.preferences import budget_spent

            note(f"note: thinking {budget_spent(event.thinking_ended_at)}")
        if self._verbose:
            for line in report(event, whole=self._verbose > 1):
                note(line)

    def interrupted(self) -> None:
        """Leave what was written."""
        self.close()

    def close(self) -> None:
        """Leave the terminal in order."""
        self._bar.clear()
        self._end_thinking()
        self._answer.end()

    def _end_thinking(self) -> None:
        if self._thought:
            self._thought = False
            sys.stderr.write("\n\n")
            sys.stderr.flush()


class JsonWriter:
    """The events as the public contract names them, one JSON object a line."""

    def __init__(self) -> None:
        self._text = ""
        self._done = False

    def prefill(self, event: PrefillProgress) -> None:
        """Write how much of the prompt is read."""
        json_line({"event": "prefill", **asdict(event)})

    def truncated(self, event: Truncated) -> None:
        """Write what of the prompt the model does not see."""
        json_line({"event": "truncated", **asdict(event)})

    def squeezed(self, event: MemoryPressure) -> None:
        """Write what was done where memory was short."""
        json_line({"event": "squeezed", **asdict(event)})

    def called(self, event: ToolCall) -> None:
        """Write a call of a tool."""
        json_line(
            {
                "event": "tool_call",
                **{name: value for name, value in asdict(event).items() if value or name != "problem"},
            }
        )

    def text(self, event: TextChunk) -> None:
        """Write a piece of the reply."""
        if event.kind == "answer":
            self._text += event.text
        json_line({"event": "text", "text": event.text, "kind": event.kind, **_tokens(event)})

    def finished(self, event: Finished) -> None:
        """Write the result."""
        self._done = not event.tool_calls  # else another reply follows
        self._text = ""
        metrics = asdict(event.metrics)
        outliers = [asdict(outlier) for outlier in event.outliers]
        diagnosis = None if event.diagnosis is None else asdict(event.diagnosis)
        told: dict[str, Any] = {"metrics": metrics, "outliers": outliers, "diagnosis": diagnosis}
        if event.doubts:
            told["doubts"] = list(event.doubts)
        told |= {"stopped_by": event.stopped_by, **_tokens(event)}
        if event.thinking_ended_at is not None:
            told["thinking_ended_at"] = event.thinking_ended_at
        json_line({"event": "finished", "reason": event.reason, "text": event.text, **told})

    def interrupted(self) -> None:
        """Write a result even though the engine gave none: nothing was measured."""
        if not self._done:
            self._done = True
            unknown: dict[str, Any] = {field.name: None for field in fields(Metrics)}
            told: dict[str, Any] = {"metrics": unknown, "outliers": [], "diagnosis": None, "stopped_by": None}
            json_line({"event": "finished", "reason": "cancelled", "text": self._text, **told})

    def close(self) -> None:
        """Nothing is left open."""


def _tokens(event: TextChunk | Finished) -> dict[str, Any]:
    """Return the tokens of an event with their log-probabilities, where they were asked for."""
    return {"tokens": [asdict(token) for token in event.logprobs]} if event.logprobs else {}


def report(event: Finished, *, whole: bool) -> Iterator[str]:
    """Yield what was measured, the gaps that stand out, the diagnosis in one sentence, and where it is wanted the whole of it."""
    from .. import verdict
    from ..units import size

    yield from describe(event.metrics)
    yield f"expected  a peak of {size(event.predicted_peak_bytes)}"
    yield from describe_gaps(event.outliers)
    yield verdict.sentence(event.metrics, event.diagnosis)
    if whole and event.diagnosis is not None:
        yield from verdict.lines(event.diagnosis)


def describe_gaps(outliers: Sequence[Outlier]) -> list[str]:
    """Return the gaps between tokens that stand out, in lines."""
    from ..chat.figures import gap_and_cause

    return [f"slow gap  {gap_and_cause(outlier)}" for outlier in outliers]


def describe(metrics: Metrics) -> list[str]:
    """Return what was measured, in lines."""
    from ..units import count, milliseconds, rate, seconds, size

    gaps = metrics.itl_ms
    p50, p95 = (gaps.p50, gaps.p95) if gaps else (None, None)
    return [
        f"prompt    {count(metrics.prompt_tokens)} tokens, {count(metrics.cached_tokens)} of them cached; "
        f"read in {seconds(metrics.prefill_s)}, {rate(metrics.prefill_tps)}; TTFT {seconds(metrics.ttft_s)}",
        f"reply     {count(metrics.generated_tokens)} tokens in {seconds(metrics.total_s)} in all; "
        f"decode {rate(metrics.decode_tps)}; gaps p50 {milliseconds(p50)}, p95 {milliseconds(p95)}",
        f"limit     {rate(metrics.ceiling_tps)} at most here; a token reads {size(metrics.weight_bytes_per_token)} of weights "
        f"and {size(metrics.kv_bytes_per_step)} of KV",
        f"memory    KV {size(metrics.kv_bytes)}, peak {size(metrics.peak_memory_bytes)}",
    ]
