"""``tokamac ask``: one answer, streamed to stdout, or several to the same prompt (``-n``); to a file of prompts: each.py.

stdout carries the answer alone (or JSON lines); progress, metrics and the model's thinking go to stderr. Thinking is shown, faint,
only where stderr is a terminal: in a script it would be noise.
"""

import argparse
import json
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import (
    Event,
    Failed,
    Finished,
    MemoryPressure,
    Message,
    PrefillProgress,
    TextChunk,
    ToolCall,
    ToolCallDelta,
    Truncated,
)
from tokamac.engine.files import expanded
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling, TemplateOptions
from tokamac.engine.passes.tokens import StepTokens

from .. import INTERRUPTED, settings
from ..backend.keep_awake import awake
from ..backend.protocol import LookedAt
from ..guide import offer
from ..options import (
    add_adapter_flag,
    add_cpu_exact_flag,
    add_kv_flags,
    add_logprobs_flag,
    add_memory_flag,
    add_model_flag,
    add_nodes_flags,
    add_parallel_flag,
    add_profile_flag,
    add_sampling_flags,
    add_schema_flag,
    add_speculation_flags,
    add_template_flags,
    add_unchecked_flag,
    check_speculation_flags,
    default_model,
    given_profile,
    kv_spec,
    nodes_of,
    over,
    parallel_of,
    prompt_cache,
    sampling,
    speculation_of,
    template_options,
    warn,
    with_logprobs,
    with_schema,
)
from ..output import ModelText, Progress, dim, is_terminal, json_line, note
from ..parser import Parser
from ..profiles import Profile
from ..prompts import STDIN, EachOptions, InputError, check_input, compose, file_blocks, read_schema
from ..sanitise import Sanitiser
from ..tools import callers
from . import loading
from .each import Earlier, answer_each, has_prompts_left, read_earlier

if TYPE_CHECKING:
    from tokamac.engine import Engine

MOST_SAMPLES = 1000
DIVIDER = "---"
"""The line between two samples."""


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "ask",
        "Stream one answer to stdout. PROMPT comes first, then the files, then what is piped in. "
        "A model's thinking goes to stderr, where that is a terminal.",
        '  tokamac ask "Why is decode memory-bound?"\n'
        '  git diff | tokamac ask "Review this"\n'
        '  tokamac ask "What do these do?" -f app/cli.py -f app/output.py --json\n'
        '  tokamac ask "Name a colour" -n 4 --seed 1\n'
        '  tokamac ask "Describe the guide" --schema answer.json\n'
        "  tokamac ask --each prompts.txt > answers.jsonl",
    )
    made.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask; - or nothing reads standard input")
    add_model_flag(made)
    made.add_argument(
        "-f", "--file", action="append", default=[], metavar="FILE", help="a text file or a PDF; may be repeated"
    )
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
    made.add_argument("-n", type=samples, metavar="N", help="N answers to the same prompt, which is read once")
    made.add_argument(
        "--each",
        metavar="FILE",
        help="answer each line of a file, or of standard input (-), several at once: a prompt a line, or JSON lines; the results "
        "are JSON lines in the same order (tokamac help each)",
    )
    made.add_argument(
        "--resume",
        metavar="OUT",
        help="with --each: leave out what a file of earlier results holds, as in --resume OUT >> OUT",
    )
    add_parallel_flag(made)
    add_speculation_flags(made)
    add_nodes_flags(made)
    add_logprobs_flag(made)
    add_schema_flag(made)
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
    add_cpu_exact_flag(made)
    add_sampling_flags(made)
    add_template_flags(made)
    add_kv_flags(made)
    add_memory_flag(made)
    return made


def samples(text: str) -> int:
    """Return a number of answers."""
    if not text.isdecimal() or len(text) > len(str(MOST_SAMPLES)) or not 1 <= int(text) <= MOST_SAMPLES:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of answers, 1 to {MOST_SAMPLES:,}")
    return int(text)


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    """Answer, and return the exit status."""
    _refuse_flags(parser, options)
    check_speculation_flags(parser, options)
    options.sharing = nodes_of(parser, options)
    profile = _profile(parser, options)
    wanted = with_logprobs(parser, options, sampling(parser, options, over(parser, profile, Sampling())))
    wanted = with_schema(parser, options, wanted, read_schema)
    kv = kv_spec(parser, options, over(parser, profile, KVSpec()))
    template = template_options(parser, options, over(parser, profile, TemplateOptions()))
    if options.each is not None:
        return _answer_each(options, profile, wanted, (kv, template))
    prompt = compose(options.prompt, options.file)
    if not prompt:
        parser.error('the prompt is empty; give one, as in tokamac ask "Why is the sky blue?", or pipe text in')
    messages = [Message("user", prompt)]
    if system := profile.system if options.system is None else options.system:
        messages.insert(0, Message("system", system))
    options.model = options.model or profile.model
    if (options.n or 1) > 1:
        return _answer_samples(options, messages, wanted, (kv, template))
    options.tools = options.tools or ",".join(profile.tools or ())
    with callers.open_tools(parser, options) as tools:
        return _answer(options, messages, wanted, (kv, template), tools)


def _refuse_flags(parser: Parser, options: argparse.Namespace) -> None:
    """End with exit status 2 where a flag has no effect beside another."""
    if options.each is None:
        if options.resume is not None:
            parser.error("--resume has no effect without --each")
        several = "-n" if (options.n or 1) > 1 else ""
    else:
        several = "--each"
        if options.prompt is not None:
            parser.error(
                "PROMPT has no effect with --each: every line is a prompt; --system says what holds for all of them"
            )
        if options.n is not None:
            parser.error("-n has no effect with --each: write the line several times, each with its own seed")
        if options.resume is not None and not options.resume.strip():
            parser.error("--resume: OUT is empty")
    for flag, given in (("--tools", options.tools), ("--allow-tools", options.allow_tools), ("--steps", options.steps)):
        if several and given:
            parser.error(f"{flag} works with a single answer, not with {several}")


def _profile(parser: Parser, options: argparse.Namespace) -> Profile:
    """Return the profile that was asked for; an empty one where none was. Raises ModelNotFoundError."""
    if options.profile is None:
        return Profile()
    read = settings.load(settings.default_path())
    if options.model is not None or read.moved:  # else the model is looked up, which says them
        warn(read.warnings)
    found = given_profile(parser, options.profile, read.settings.profiles)
    if options.model is None:
        from ..models.local import require

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
        engine = loading.load_for(
            options,
            model,
            kv,
            prompt_cache(options),
            speculation=speculation_of(options, model),
            nodes=options.sharing,
            on_interrupt=writer.interrupted,
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


def _loaded(options: argparse.Namespace, kv: KVSpec) -> "Engine":
    """Return an engine for several replies at once. Raises TokamacError."""
    model = options.model or default_model()
    cache = prompt_cache(options) or (PromptCacheSpec(disk=False) if options.n else None)  # the answers share it
    return loading.load_for(
        options,
        model,
        kv,
        cache,
        parallel=parallel_of(options),
        speculation=speculation_of(options, model),
        nodes=options.sharing,
    )


def _answer_each(
    options: argparse.Namespace, profile: Profile, wanted: Sampling, how: tuple[KVSpec, TemplateOptions]
) -> int:
    """Answer every line of a file, and return the exit status."""
    kv, template = how
    system = profile.system if options.system is None else options.system
    every = EachOptions("\n\n".join(file_blocks(options.file)), system, wanted, template)
    check_input(options.each)  # now, not after the model is loaded
    earlier = Earlier() if options.resume is None else read_earlier(expanded(options.resume))
    if not has_prompts_left(options.each, earlier, every):
        return 0
    options.model = options.model or profile.model
    with _loaded(options, kv) as engine:
        parallel = parallel_of(options)
        return answer_each(engine, options.each, earlier, every, parallel=parallel, verbose=bool(options.verbose))


def _answer_samples(
    options: argparse.Namespace,
    messages: list[Message],
    wanted: Sampling,
    how: tuple[KVSpec, TemplateOptions],
) -> int:
    """Write several answers to the same prompt, which are made at once; return the exit status."""
    kv, template = how
    near_to = messages[-1].content if (options.model or default_model()) == GUIDE else ""
    writers: list[JsonWriter | TextWriter] = [
        JsonWriter(sample) if options.json else TextWriter(verbose=options.verbose) for sample in range(options.n)
    ]
    stopped, failed, shown = threading.Event(), False, 0
    with _loaded(options, kv) as engine, ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.close)

        def stop() -> None:
            stopped.set()
            engine.cancel()

        def events() -> Iterator[tuple[int, Event | Failed]]:
            with closing(engine.generate_many([messages], wanted, n=options.n, template=template)) as told:
                for _, sample, event in told:
                    if stopped.is_set():
                        engine.cancel()  # those too that began only now
                    yield sample, event

        with loading.interrupting(stop):
            for sample, event in events() if options.json else in_order(events()):
                if not options.json and sample > shown:
                    print(DIVIDER, flush=True)
                    shown = sample
                if isinstance(event, Failed):
                    writers[sample].failed(event.error, sample)
                    failed = True
                else:
                    write_event(event, writers[sample], near_to=near_to)
    return INTERRUPTED if stopped.is_set() else 1 if failed else 0


def in_order(events: Iterator[tuple[int, Event | Failed]]) -> Iterator[tuple[int, Event | Failed]]:
    """Yield the events of several answers, one answer after another: of the first as they come, of the next what was held back."""
    held: defaultdict[int, deque[Event | Failed]] = defaultdict(deque)
    at = 0
    for sample, came in events:
        held[sample].append(came)
        while held[at]:
            event = held[at].popleft()
            yield at, event
            at += isinstance(event, Finished | Failed)


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
        with nullcontext(sys.stderr) if name == STDIN else expanded(name).open("w", encoding="utf-8") as file:
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
        end = write_event(event, writer, near_to=near_to)
    return end


def write_event(event: Event, writer: "JsonWriter | TextWriter", *, near_to: str = "") -> Finished | None:
    """Write an event of a reply; return it where it is the end."""
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
    elif isinstance(event, ToolCallDelta):
        pass  # the call is written once it is whole
    else:
        more = offer(near_to, event.text) if near_to and event.reason == "stop" else ""
        if more:
            writer.text(TextChunk(more))
        writer.finished(replace(event, text=event.text + more) if more else event)
        return event
    return None


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

    def failed(self, error: TokamacError, sample: int) -> None:
        """Say why this answer of several ends here."""
        self.close()
        note(f"answer {sample + 1}: {error.one_line()}")

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
    """The events as the public contract names them, one JSON object a line. sample: which answer of several they are of."""

    def __init__(self, sample: int | None = None) -> None:
        self._text = ""
        self._done = False
        self._own: dict[str, Any] = {} if sample is None else {"sample": sample}

    def prefill(self, event: PrefillProgress) -> None:
        """Write how much of the prompt is read."""
        self._write({"event": "prefill", **asdict(event)})

    def truncated(self, event: Truncated) -> None:
        """Write what of the prompt the model does not see."""
        self._write({"event": "truncated", **asdict(event)})

    def squeezed(self, event: MemoryPressure) -> None:
        """Write what was done where memory was short."""
        self._write({"event": "squeezed", **asdict(event)})

    def called(self, event: ToolCall) -> None:
        """Write a call of a tool."""
        self._write(
            {
                "event": "tool_call",
                **{name: value for name, value in asdict(event).items() if value or name != "problem"},
            }
        )

    def text(self, event: TextChunk) -> None:
        """Write a piece of the reply."""
        if event.kind == "answer":
            self._text += event.text
        self._write({"event": "text", "text": event.text, "kind": event.kind, **_tokens(event)})

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
        self._write({"event": "finished", "reason": event.reason, "text": event.text, **told})

    def interrupted(self) -> None:
        """Write a result even though the engine gave none: nothing was measured."""
        if not self._done:
            self._done = True
            unknown: dict[str, Any] = {field.name: None for field in fields(Metrics)}
            told: dict[str, Any] = {"metrics": unknown, "outliers": [], "diagnosis": None, "stopped_by": None}
            self._write({"event": "finished", "reason": "cancelled", "text": self._text, **told})

    def failed(self, error: TokamacError, sample: int) -> None:  # noqa: ARG002  # as TextWriter
        """Write why this answer of several has no result."""
        self._done = True
        self._write({"event": "error", "error": error.message, "hint": error.hint})

    def close(self) -> None:
        """Nothing is left open."""

    def _write(self, told: dict[str, Any]) -> None:
        json_line({**told, **self._own})


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
