"""Tools as OpenAI's clients name them, and the functions that a model is offered for them."""

# A model is offered functions alone. What a client calls a custom tool takes a text, so it is a function of one
# argument; a tool in a namespace has that before its name. Calls are told as the client knows them.

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tokamac.engine.events import ModelSpec, ToolCall
from tokamac.engine.options import TemplateOptions, ToolSpec

from .answering import as_json
from .request import Fields, ToolChoice, among, checked, must_call, tool_call, tool_spec, unsupported

FREE_TEXT = '{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": false}'


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of the client. name, namespace: its own, "" being none. spec: the function that stands for it."""

    spec: ToolSpec
    name: str
    namespace: str = ""
    is_custom: bool = False


def read_tools(given: Fields, info: ModelSpec, *, nested: bool) -> dict[str, OfferedTool]:
    """Return tools by the names of their functions. nested: a definition stands in a field named as its type."""
    offered = [each for tool in given.each("tools") for each in _offered(tool, info, nested)]
    specs = tuple(each.spec for each in offered)
    checked("tools", lambda: TemplateOptions(tools=specs))  # two of one name are refused
    return {each.spec.name: each for each in offered}


def _offered(tool: Fields, info: ModelSpec, nested: bool, namespace: str = "") -> Iterator[OfferedTool]:
    kind = tool.text("type") or "function"
    if kind == "namespace":
        within = tool.needed_text("name")
        tool.ignore("description")
        for inner in tool.each("tools"):
            yield from _offered(inner, info, nested, within)
    elif kind in ("function", "custom"):
        definition = tool.nested(kind if nested else "")
        name = definition.needed_text("name")
        spec = tool_spec(definition, info, name=full_name(name, namespace))
        if is_custom := kind == "custom":
            definition.ignore_unless("format", {"type": "text"})
            spec = replace(spec, parameters=FREE_TEXT)
        definition.done()
        yield OfferedTool(spec, name, namespace, is_custom)
    else:
        tool.ignore(kind)
        return
    tool.done()


def full_name(name: str, namespace: str | None) -> str:
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def free_text(call: ToolCall) -> str:
    """Return what a custom tool is called with."""
    found = call.values.get("input")
    return found if isinstance(found, str) else call.arguments


def tool_choice(given: Fields, offered: Mapping[str, OfferedTool], *, nested: bool) -> ToolChoice:
    """Return the tools that may or must be called. nested: a tool's name stands in a field named as its type."""
    choice, tools = given.raw("tool_choice"), tuple(each.spec for each in offered.values())
    if choice is None or choice == "auto":
        return ToolChoice(tools)
    if choice == "none":
        return ToolChoice(())
    if choice == "required":
        return must_call(tools, [each.name for each in tools], "tool_choice")
    if not isinstance(choice, dict):
        raise unsupported("tool_choice", as_json(choice).decode()[:60], 'Use "none", "auto", "required" or a function.')
    chosen = given.nested("tool_choice")
    kind = chosen.one_of("type", ("function", "custom", "allowed_tools"))
    if kind in ("function", "custom"):
        return must_call(tools, [_named(chosen, nested)], "tool_choice", one_call=True)
    allowed = chosen.inner("allowed_tools") if nested else chosen
    if kind is None or allowed is None:
        raise chosen.missing("allowed_tools" if kind else "type")
    mode = allowed.one_of("mode", ("auto", "required"))
    names = [_named(each, nested) for each in allowed.each("tools")]
    allowed.done()
    chosen.done()
    return among(tools, names, "tool_choice", mode or "auto")


def _named(given: Fields, nested: bool) -> str:
    kind = given.one_of("type", ("function", "custom"))
    inner = given.nested((kind or "function") if nested else "")
    name = full_name(inner.needed_text("name"), inner.text("namespace"))
    inner.done()
    given.done()
    return name


def read_call(given: Fields) -> ToolCall:
    kind = given.one_of("type", ("function", "custom")) or "function"
    given.idle("index")
    inner, id = given.nested(kind), given.needed_text("id")
    name = inner.needed_text("name")
    arguments = text_input(inner.text("input")) if kind == "custom" else inner.text("arguments")
    inner.done()
    given.done()
    return tool_call(name, arguments or "", id)


def text_input(text: str | None) -> str:
    """Return the arguments of a custom tool's function."""
    return as_json({"input": text or ""}).decode()
