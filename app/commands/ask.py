"""``tokamac ask``: one answer streamed to stdout, with tools, or several (``-n``); files of prompts: prompts.py."""

import argparse
import json
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.events import (
    Event,
    Failed,
    Finished,
    MemoryPressure,
    Message,
    PrefillProgress,
    StepTokens,
    TextChunk,
    ToolCall,
    Truncated,
)
from tokamac.engine.files import expanded
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import KVSpec, PromptCacheSpec, Sampling, TemplateOptions, ToolSpec

from .. import INTERRUPTED, prompt_files, settings
from ..backend.keep_awake import awake
from ..chat.attachments import Draft
from ..guide import offer
from ..options import (
    add_flags,
    add_nodes_flags,
    add_profile_flag,
    add_reply_flags,
    add_speculation_flags,
    check_speculation_flags,
    default_model,
    given_profile,
    known_settings,
    kv_spec,
    model_name,
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
from ..parser import Parser
from ..reports import cache_use
from ..settings import Profile
from ..store.values import ToolResult
from ..text.sanitise import Sanitiser, sanitise, sanitise_line
from ..text.terminal import ModelText, Progress, dim, is_terminal, json_line, note, quote, table
from ..tools.calls import (
    ASKED,
    DENIED,
    CallAsks,
    CallRuns,
    ToolError,
    ToolLoop,
    call_line,
    decision_of,
    decisions_text,
    edited_arguments,
    question_of,
)
from . import loading
from .prompts import (
    STDIN,
    EachOptions,
    Earlier,
    InputError,
    answer_each,
    check_input,
    compose,
    drafted,
    fetch_pages,
    file_blocks,
    has_prompts_left,
    is_stream,
    pictures_apart,
    read_earlier,
    read_schema,
)

if TYPE_CHECKING:
    from tokamac.engine import Engine

    from ..tools.toolbox import Toolbox
    from .kept_chat import KeptChat


T = TypeVar("T")


class AskTools:
    def __init__(
        self, box: "Toolbox | None", names: Sequence[str], known: settings.ToolSettings, *, allow: bool
    ) -> None:
        self._box = box
        self._loop = ToolLoop()
        self._loop.most = known.calls
        if box is not None:
            self._loop.specs = box.specs(names)
            self._loop.furthest = box.furthest
        self._loop.allowed = set(known.allowed)
        self._allowed = {spec.name for spec in self.specs} if allow else set[str]()  # for this answer

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return self._loop.specs

    def why_stop(self, calls: Sequence[ToolCall]) -> str:
        return self._loop.why_stop(calls)

    def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self._loop.begin(calls, self._loop.specs, self._allowed)
        results: list[ToolResult] = []
        while (step := self._loop.next()) is not None:
            match step:
                case ToolResult():
                    result = step
                case CallRuns(call):
                    result = self._run(call)
                case CallAsks(call):
                    result = self._asked(call)
            if result.outcome != "done":
                note(f"{call_line(result.call)}: {result.text}")
            results.append(result)
        return results

    def _run(self, call: ToolCall) -> ToolResult:
        assert self._box is not None  # without it no tool has a name
        note(f"calling {call_line(call)}")
        return self._box.run(call)

    def _asked(self, call: ToolCall) -> ToolResult:
        if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
            note("nobody is here to allow a call; --allow-tools allows all of them")
            return ToolResult(call, DENIED, "refused")
        assert self._box is not None
        try:
            preview = self._box.preview(call)
        except ToolError as error:
            return ToolResult(call, f"Error: {error.one_line()}", "failed")
        decisions = ASKED if preview is None else preview.decisions
        quote([("", "The model wants to call:"), *question_of(call, preview)])
        decision = None
        while decision is None:
            sys.stderr.write(decisions_text(decisions))
            sys.stderr.flush()
            line = sys.stdin.readline()
            decision = decision_of(line, decisions) if line else "deny"
        if decision == "edit" and preview is not None:
            return self._asked(self._edited(call, preview.edits))
        if decision == "always":
            self._keep(call.name)
        return ToolResult(call, DENIED, "refused") if self._loop.decide(decision) is None else self._run(call)

    def _edited(self, call: ToolCall, name: str) -> ToolCall:
        from ..chat.external_programs import EditorError, edit_text, editor_command

        try:
            text = edit_text(editor_command(), sanitise(str(call.values[name])))
        except EditorError as error:
            note(str(error))
            return call
        return self._loop.revise(edited_arguments(call, name, text)) or call

    @staticmethod
    def _keep(name: str) -> None:
        known = known_settings()
        allowed = tuple(dict.fromkeys((*known.tools.allowed, name)))
        try:
            warn(settings.change(settings.default_path(), known, settings.with_allowed(known, allowed)))
        except OSError as error:
            note(f"the settings could not be written: {error.strerror}")


@contextmanager
def open_tools(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[AskTools]:
    names = [name.strip() for name in options.tools.split(",") if name.strip()]
    known = known_settings() if names else settings.Settings()
    if not names:
        if options.allow_tools:
            parser.error("--allow-tools allows the calls of --tools; name some")
        if options.allow_changes:
            parser.error("--allow-changes lets --tools name write_file, edit_file or run; name some")
        yield AskTools(None, (), known.tools, allow=False)
        return
    from platformdirs import user_log_path

    from ..tools.toolbox import Toolbox

    box = Toolbox(known, Path.cwd(), user_log_path("tokamac") / "mcp.log")
    try:
        try:
            names = list(box.check(names))
            if (acting := [name for name in names if name in box.acting]) and not options.allow_changes:
                parser.error(f"{', '.join(acting)}: add --allow-changes to let the model change files or run commands")
        except TokamacError as error:
            parser.error(error.one_line())
        for name in box.pending(names):
            box.start(name)
        yield AskTools(box, names, known.tools, allow=options.allow_tools)
    finally:
        box.close()


# stdout has only the answer (or JSON lines); progress, metrics and thinking go to stderr, thinking only to a terminal.


MOST_SAMPLES = 1000
DIVIDER = "---"  # the line between two samples


def parser() -> Parser:
    made = Parser(
        "ask",
        "Stream one answer to stdout. Files and piped input are put before PROMPT. Thinking goes to stderr, if that is a "
        "terminal.",
        '  tokamac ask "Why is decode memory-bound?"\n'
        '  git diff | tokamac ask "Review this"\n'
        '  tokamac ask "What do these do?" -f app/cli.py -f app/text/terminal.py --json\n'
        '  git diff | tokamac ask --prompt review "the tests first"\n'
        '  tokamac ask "Name a colour" -n 4 --seed 1\n'
        '  tokamac ask -c "And in one sentence?"\n'
        '  tokamac ask "Describe the guide" --schema answer.json\n'
        "  tokamac ask --each prompts.txt > answers.jsonl\n"
        '  tokamac ask --compare qwen3:4b,llama3.2:3b "Why is the sky blue?"',
    )
    made.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question; - or nothing reads standard input")
    add_flags(made, "-m --model", "-f --file", "--system", "--prompt")
    made.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="picture for a model that sees, before the prompt"
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument(
        "-c",
        "--continue",
        action="store_true",
        dest="resume_chat",
        help="continue the last chat, and keep the answer in it",
    )
    which.add_argument("--chat", metavar="ID", help="continue this chat; IDs can be abbreviated")
    add_profile_flag(made, "none")
    made.add_argument(
        "--json",
        action="store_true",
        help="events as JSON lines: truncated, memory_pressure, prefill, text, finished, error",
    )
    made.add_argument(
        "--tools",
        metavar="NAMES",
        default="",
        help="tools and MCP servers the model may call, comma-separated (tokamac help tools)",
    )
    made.add_argument("--allow-tools", action="store_true", help="run tool calls without asking")
    made.add_argument(
        "--allow-changes",
        action="store_true",
        help="let --tools name write_file, edit_file and run; each call asks, unless --allow-tools is given",
    )
    made.add_argument("--allow-web", action="store_true", help="fetch -f URL without asking")
    made.add_argument("-n", type=samples, metavar="N", help="write N answers to the prompt")
    made.add_argument(
        "--each",
        metavar="FILE",
        help="answer every line of a file (- for standard input) in parallel: prompts or JSON lines; prints JSON lines in the same "
        "order (tokamac help each)",
    )
    made.add_argument(
        "--compare",
        metavar="A,B",
        help="answer with several models in turn, and print a table of speed, first token and memory; with --each for every line",
    )
    made.add_argument(
        "--resume", metavar="OUT", help="with --each: skip what OUT answers already, as in --resume OUT >> OUT"
    )
    add_flags(made, "--parallel", "--pace")
    add_speculation_flags(made)
    add_nodes_flags(made)
    add_flags(made, "--logprobs", "--schema")
    made.add_argument(
        "--steps",
        metavar="FILE",
        help="write time, bytes and likely tokens of each step to FILE (- for stderr), as JSON lines",
    )
    made.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="print metrics and a diagnosis to stderr; -vv with all formulas",
    )
    add_reply_flags(made)
    made.set_defaults(hear=None)
    return made


def _compare(parser: Parser, options: argparse.Namespace) -> int:
    """Answer with each model in turn, then print what each took."""
    names = [name.strip() for name in options.compare.split(",") if name.strip()]
    if len(names) < 2:
        parser.error("--compare takes two models or more: --compare qwen3:4b,llama3.2:3b")
    models = list(dict.fromkeys(map(model_name, names)))
    fetch_pages(options.file, allowed=options.allow_web)
    piped = None if options.each is not None else compose(options.prompt, options.file)
    measured: dict[str, list[Metrics]] = {model: [] for model in models}
    status = 0
    for number, model in enumerate(models):
        own = argparse.Namespace(**{**vars(options), "compare": None, "model": model, "hear": measured[model].append})
        if piped is not None:
            own.prompt, own.file = piped, []
            if not options.json:
                print(f"{DIVIDER}\n" * bool(number) + f"{sanitise_line(model)}:", flush=True)
        status = max(status, run(parser, own))
        if status == INTERRUPTED:
            break
    out = sys.stderr if options.json or options.each is not None else sys.stdout
    print(f"\n{compared(measured)}", file=out, flush=True)
    return status


def compared(measured: Mapping[str, Sequence[Metrics]]) -> str:
    """Return a table: medians of each model's answers, and the most memory of one."""
    from ..text.units import UNKNOWN, count, rate, seconds, size

    rows: list[tuple[str, ...]] = [("model", "answers", "tok/s", "first token", "memory")]
    for model, all_ in measured.items():
        tps, ttft = (
            median(known) if (known := [value for each in all_ if (value := getattr(each, name)) is not None]) else None
            for name in ("decode_tps", "ttft_s")
        )
        peak = max((each.peak_memory_bytes for each in all_ if each.peak_memory_bytes is not None), default=None)
        shown = ("" if tps is None else rate(tps).removesuffix(" tok/s"), "" if ttft is None else seconds(ttft))
        rows.append((sanitise_line(model), count(len(all_)), *(each or UNKNOWN for each in shown), size(peak)))
    return table(rows, right=range(1, len(rows[0])))


def samples(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MOST_SAMPLES)) or not 1 <= int(text) <= MOST_SAMPLES:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of answers, 1 to {MOST_SAMPLES:,}")
    return int(text)


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    _refuse_flags(parser, options)
    if options.compare is not None:
        return _compare(parser, options)
    check_speculation_flags(parser, options)
    options.sharing = nodes_of(parser, options)
    profile, file = _profile(parser, options), _prompt_file(options)
    fetch_pages(options.file, allowed=options.allow_web)
    with _kept_chat(options) as kept:

        def over_both(base: T) -> T:
            return prompt_files.over(file, over(parser, profile, base))

        wanted = sampling(parser, options, over_both(Sampling() if kept is None else kept.sampling))
        wanted = with_schema(parser, options, with_logprobs(parser, options, wanted), read_schema)
        kv = kv_spec(parser, options, over(parser, profile, KVSpec() if kept is None else kept.kv))
        told = over_both(TemplateOptions() if kept is None else kept.template)
        how = (kv, template_options(parser, options, told))
        if options.each is not None:
            return _answer_each(options, profile, wanted, how)
        files, shown = pictures_apart(options.file, options.image)
        prompt = Draft(compose(options.prompt, files)) if kept is None else drafted(options.prompt, files)
        prompt = replace(prompt, attachments=(*shown, *prompt.attachments))
        if not prompt.whole:
            parser.error('the prompt is empty; give one, as in tokamac ask "Why is the sky blue?", or pipe text in')
        options.model = options.model or file.profile.model
        system = next((each for each in (options.system, profile.system) if each is not None), None)
        options.model = options.model or profile.model
        if (options.n or 1) > 1:
            return _answer_samples(options, conversation_of(prompt, system), wanted, how)
        options.tools = options.tools or ",".join(file.profile.tools or profile.tools or ())
        with open_tools(parser, options) as tools:
            return _answer(options, (prompt, system), wanted, how, tools, kept=kept)


@contextmanager
def _kept_chat(options: argparse.Namespace) -> "Iterator[KeptChat | None]":
    """Yield the stored chat to continue, or None. Raises StoreError."""
    if not options.resume_chat and options.chat is None:
        yield None
        return
    from .kept_chat import KeptChat

    with closing(KeptChat.open(options.chat, known_settings())) as kept:
        yield kept


def conversation_of(prompt: Draft, system: str | None) -> list[Message]:
    return [*([Message("system", system)] if system else []), Message("user", prompt.whole, images=prompt.images)]


def _refuse_flags(parser: Parser, options: argparse.Namespace) -> None:
    """Exit with status 2 for a flag without effect."""
    if options.each is None:
        if options.resume is not None:
            parser.error("--resume has no effect without --each")
        several = "-n" if (options.n or 1) > 1 else ""
    else:
        several = "--each"
        if options.image:
            parser.error("--image has no effect with --each: a line is text")
        if options.prompt is not None:
            parser.error(
                "PROMPT has no effect with --each: every line is a prompt; --system says what holds for all of them"
            )
        if options.n is not None:
            parser.error("-n has no effect with --each: write the line several times, each with its own seed")
        if options.prompt_file is not None:
            parser.error("--prompt has no effect with --each: every line is a prompt")
        if options.resume is not None and not options.resume.strip():
            parser.error("--resume: OUT is empty")
    if options.prompt_file is not None and options.prompt == STDIN:
        parser.error("PROMPT - has no effect with --prompt: pipe the text in")
    if options.compare is not None:
        beside = {"-m": options.model, "-n": options.n, "--resume": options.resume, "--steps": options.steps}
        beside |= {"--continue": options.resume_chat, "--chat": options.chat}
        if options.each is not None and is_stream(options.each):
            parser.error("--compare reads the prompts once a model: give --each a file")
        if flag := next((flag for flag, given in beside.items() if given), ""):
            parser.error(f"{flag} has no effect with --compare")
    single = {
        "--tools": options.tools, "--allow-tools": options.allow_tools, "--allow-changes": options.allow_changes,
        "--steps": options.steps,
        "--continue": options.resume_chat, "--chat": options.chat,
    }  # fmt: skip
    for flag, given in single.items():
        if several and given:
            parser.error(f"{flag} works with a single answer, not with {several}")


def _prompt_file(options: argparse.Namespace) -> prompt_files.PromptFile:
    """Return the prompt of ``--prompt``, whose text with PROMPT becomes PROMPT; without the flag an empty one."""
    if options.prompt_file is None:
        return prompt_files.PromptFile("", "")
    folder = prompt_files.folder_in(settings.default_path().parent)
    found = prompt_files.read(folder, options.prompt_file)
    options.prompt = found.filled(options.prompt or "")
    if found.profile.model is not None:
        found = replace(found, profile=replace(found.profile, model=model_name(found.profile.model)))
    return found


def _profile(parser: Parser, options: argparse.Namespace) -> Profile:
    """Return the requested or an empty profile. Raises ModelNotFoundError."""
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
    asked: tuple[Draft, str | None],
    wanted: Sampling,
    how: tuple[KVSpec, TemplateOptions],
    tools: AskTools,
    *,
    kept: "KeptChat | None",
) -> int:
    (kv, template), (prompt, system) = how, asked
    writer = JsonWriter(chat=None if kept is None else kept.id) if options.json else TextWriter(verbose=options.verbose)
    model, time = options.model or (kept and kept.model) or default_model(), loading.CommandTime()
    try:
        engine = loading.load(
            options,
            model,
            kv,
            prompt_cache(options),
            speculation=speculation_of(options, model),
            nodes=options.sharing,
            on_interrupt=writer.interrupted,
        )
        time.loaded()
        with engine:
            told, near_to = replace(template, tools=tools.specs), prompt.whole if model == GUIDE else ""
            messages = conversation_of(prompt, system)
            if kept is not None:
                kept.ask(prompt, model, wanted, kv, template)
                messages = list(kept.messages(kept.system if system is None else system))
            while True:
                events = engine.generate(messages, wanted, template=told)
                heard = events if kept is None else kept.hear(events)
                with loading.interrupting(engine.cancel), closing(heard):
                    end = write_reply(map(time.counted, heard), writer, near_to=near_to)
                if end is None or not end.tool_calls or end.reason == "cancelled":
                    break
                if why := tools.why_stop(end.tool_calls):
                    break
                results = [each.told_to(sees=engine.spec.sees) for each in tools.answer(end.tool_calls)]
                said = Message("assistant", end.text, end.thinking, end.tool_calls)
                messages = [*messages, said, *(each.as_message for each in results)]
                if kept is not None:
                    kept.answer(results)
            if end is not None and options.hear is not None:
                options.hear(end.metrics)
            if end is not None and options.steps is not None:
                with loading.interrupting(engine.cancel):
                    write_steps(engine, messages, end, options.steps, told)
            if end is None or end.reason == "cancelled":
                return INTERRUPTED
            if end.tool_calls:
                note(f"stopped without an answer: {why}")
                return 1
            return 0
    except KeyboardInterrupt:
        writer.interrupted()
        raise
    finally:
        writer.close()


def _hear(options: argparse.Namespace, metrics: Mapping[str, Any] | None) -> None:
    """Tell a comparison the figures of an answer."""
    if options.hear is not None and metrics is not None:
        options.hear(Metrics(**metrics))


def _loaded(options: argparse.Namespace, kv: KVSpec) -> "Engine":
    """Load an engine for parallel replies. Raises TokamacError."""
    model = options.model or default_model()
    cache = prompt_cache(options) or (PromptCacheSpec(disk=False) if options.n else None)  # the answers share it
    return loading.load(
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
        more = {} if options.hear is None else {"model": options.model}
        return answer_each(
            engine,
            options.each,
            earlier,
            every,
            parallel=parallel,
            verbose=bool(options.verbose),
            more=more,
            hear=lambda result: _hear(options, result.get("metrics")),
        )


def _answer_samples(
    options: argparse.Namespace, messages: list[Message], wanted: Sampling, how: tuple[KVSpec, TemplateOptions]
) -> int:
    kv, template = how
    near_to = messages[-1].content if (options.model or default_model()) == GUIDE else ""
    writers: list[JsonWriter | TextWriter] = [
        JsonWriter(sample) if options.json else TextWriter(verbose=options.verbose) for sample in range(options.n)
    ]
    stopped, failed, shown, time = threading.Event(), False, 0, loading.CommandTime()
    with _loaded(options, kv) as engine, ExitStack() as stack:
        time.loaded()
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
                    yield sample, event if isinstance(event, Failed) else time.counted(event)

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
    """Yield events answer by answer: the current one's live, later ones' buffered."""
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
    """Write one JSON line per step to file ``name`` or stderr. Raises InputError."""
    from ..backend.protocol import LookedAt
    from ..chat.conversation import Reply
    from ..chat.reply_steps import ReplySteps

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
                steps.receive(LookedAt(0, tokens=event))
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
    """Write a reply's events; return its end, None if missing. near_to: the question for the guide's near misses."""
    end = None
    for event in events:
        end = write_event(event, writer, near_to=near_to)
    return end


def write_event(event: Event, writer: "JsonWriter | TextWriter", *, near_to: str = "") -> Finished | None:
    if not isinstance(event, Finished):
        writer.write(event)
        return None
    more = offer(near_to, event.text) if near_to and event.reason == "stop" else ""
    if more:
        writer.write(TextChunk(more))
    writer.write(replace(event, text=event.text + more) if more else event)
    return event


class TextWriter:
    def __init__(self, *, verbose: int) -> None:
        self._verbose = verbose
        self._answer = ModelText(sys.stdout)
        self._bar = Progress("reading the prompt", unit="tokens", plain=False)
        self._thinking = Sanitiser() if is_terminal(sys.stderr) else None
        self._thought = False

    def write(self, event: Event) -> None:
        match event:
            case PrefillProgress(done, total):
                self._bar.update(done, total)
            case Truncated(tokens=tokens):
                note(f"note: the prompt does not fit the context; {tokens:,} tokens of its middle were left out")
            case MemoryPressure():
                from ..reports.verdict import pressure_sentence

                note(f"note: {pressure_sentence(event)}")
            case ToolCall():  # its result is printed when it is answered
                self.close()
            case TextChunk(text, "answer"):
                self._bar.clear()
                self._end_thinking()
                self._answer.write(text)
            case TextChunk(text):
                self._bar.clear()
                if self._thinking:
                    self._thought = True
                    sys.stderr.write(dim(self._thinking.feed(text)))
                    sys.stderr.flush()
            case Finished():
                self.close()
                self._note_end(event)

    def _note_end(self, event: Finished) -> None:
        for doubt in event.doubts:
            note(f"unchecked: {doubt}; this text may be wrong")
        if event.cut_by == "context":
            note("note: stopped: the context is full")
        if event.reason == "loop":
            note("note: stopped: the answer repeats itself (--loop-check off lets it)")
        if event.thinking_ended_at is not None:
            from ..chat.preferences import budget_spent

            note(f"note: thinking {budget_spent(event.thinking_ended_at)}")
        if self._verbose:
            for line in report(event, whole=self._verbose > 1):
                note(line)

    def failed(self, error: TokamacError, sample: int) -> None:
        self.close()
        note(f"answer {sample + 1}: {error.one_line()}")

    def interrupted(self) -> None:
        self.close()

    def close(self) -> None:
        self._bar.clear()
        self._end_thinking()
        self._answer.end()

    def _end_thinking(self) -> None:
        if self._thought:
            self._thought = False
            sys.stderr.write("\n\n")
            sys.stderr.flush()


class JsonWriter:
    """Events in the public JSON lines format. sample: answer index. chat: where it is saved."""

    def __init__(self, sample: int | None = None, chat: str | None = None) -> None:
        self._text = ""
        self._done = False
        self._kept: dict[str, Any] = {} if chat is None else {"chat": chat}
        self._own: dict[str, Any] = {} if sample is None else {"sample": sample}

    def write(self, event: Event) -> None:
        match event:
            case PrefillProgress():
                self._write("prefill", asdict(event))
            case Truncated():
                self._write("truncated", asdict(event))
            case MemoryPressure():
                for name in ("memory_pressure", "squeezed"):  # its name until 0.2, for one version more
                    self._write(name, asdict(event))
            case ToolCall():
                call = asdict(event)
                self._write(
                    "tool_call",
                    {name: call[name] for name in call if call[name] or name not in ("problem", "mistyped")},
                )
            case TextChunk(text, kind):
                self._text += text if kind == "answer" else ""
                self._write("text", {"text": text, "kind": kind, **_tokens(event)})
            case Finished():
                self._finish(event)

    def _finish(self, event: Finished) -> None:
        self._done = not event.tool_calls  # else another reply follows
        self._text = ""
        metrics = asdict(event.metrics)
        outliers = [asdict(outlier) for outlier in event.outliers]
        diagnosis = None if event.diagnosis is None else asdict(event.diagnosis)
        told: dict[str, Any] = {"metrics": metrics, "outliers": outliers, "diagnosis": diagnosis}
        if event.doubts:
            told["doubts"] = list(event.doubts)
        if event.cache is not None:
            told["cache"] = cache_use.as_json(event.cache)
        told |= {"stopped_by": event.stopped_by, **_tokens(event)}
        if event.thinking_ended_at is not None:
            told["thinking_ended_at"] = event.thinking_ended_at
        self._write("finished", {"reason": event.reason, "text": event.text, **told, **self._kept})

    def interrupted(self) -> None:
        if not self._done:
            self._done = True
            unknown: dict[str, Any] = {field.name: None for field in fields(Metrics)}
            told: dict[str, Any] = {"metrics": unknown, "outliers": [], "diagnosis": None, "stopped_by": None}
            self._write("finished", {"reason": "cancelled", "text": self._text, **told, **self._kept})

    def failed(self, error: TokamacError, sample: int) -> None:  # noqa: ARG002  # as TextWriter
        self._done = True
        self._write("error", {"error": error.message, "hint": error.hint})

    def close(self) -> None:
        """Do nothing."""

    def _write(self, name: str, told: dict[str, Any]) -> None:
        json_line({"event": name, **told, **self._own})


def _tokens(event: TextChunk | Finished) -> dict[str, Any]:
    return {"tokens": [asdict(token) for token in event.logprobs]} if event.logprobs else {}


def report(event: Finished, *, whole: bool) -> Iterator[str]:
    """Yield metrics, outlier gaps and the diagnosis, in one sentence or ``whole``."""
    from ..reports import verdict

    yield from describe(event.metrics, event.predicted_peak_bytes)
    if event.cache is not None and (why := cache_use.why(event.cache)):
        yield f"cache     {why}"
    yield from describe_gaps(event.outliers)
    if event.diagnosis is not None:
        yield f"time      {verdict.time_text(event.diagnosis)}"
    yield verdict.sentence(event.metrics, event.diagnosis)
    if whole and event.diagnosis is not None:
        yield from verdict.lines(event.diagnosis)


def describe_gaps(outliers: Sequence[Outlier]) -> list[str]:
    from ..chat.figures import gap_and_cause

    return [f"slow gap  {gap_and_cause(outlier)}" for outlier in outliers]


def describe(metrics: Metrics, expected_peak_bytes: int | None = None) -> Iterator[str]:
    from ..reports.verdict import figures_text, limit_text, pace_text, prompt_text
    from ..text.units import size

    yield f"prompt    {prompt_text(metrics)}"
    pace = pace_text(metrics)
    yield f"reply     {figures_text(metrics)}{f'; time per token: {pace}' if pace else ''}"
    reads = {"weights": metrics.weight_bytes_per_token, "KV": metrics.kv_bytes_per_step}
    read = " and ".join(f"{size(nbytes)} of {name}" for name, nbytes in reads.items() if nbytes is not None)
    yield f"limit     {limit_text(metrics)}{f'; a step reads {read}' if read else ''}"
    held = {"KV": metrics.kv_bytes, "peak": metrics.peak_memory_bytes, "expected peak": expected_peak_bytes}
    if known := ", ".join(f"{name} {size(nbytes)}" for name, nbytes in held.items() if nbytes is not None):
        yield f"memory    {known}"
