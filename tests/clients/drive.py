"""One turn of a client, tool calls with it: ``python drive.py NAME URL MODEL [plain]``, by the Python that has the client.

Prints one JSON line: the tools that were called, and the text that ended the turn. Nothing of Tokamac is imported.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

PROMPT = "Read notes.md, and say what 6 * 7 is."
PLAIN = "What is the capital of France?"  # a small model ends its answer
KEY = "none"
called: list[str] = []


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Of the file.
    """
    called.append("read_file")
    return f"{path} is empty"


def calculate(expression: str) -> str:
    """Calculate.

    Args:
        expression: Numbers and signs.
    """
    called.append("calculate")
    return f"{expression} is 42"


TOOLS = {"read_file": read_file, "calculate": calculate}
SCHEMAS = {
    name: {
        "type": "object",
        "properties": {field: {"type": "string"}},
        "required": [field],
        "additionalProperties": False,
    }
    for name, field in (("read_file", "path"), ("calculate", "expression"))
}
FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


def openai_chat(url: str, model: str) -> str:
    from openai import OpenAI

    client, messages = OpenAI(base_url=f"{url}/v1", api_key=KEY), [{"role": "user", "content": PROMPT}]
    for _ in range(2):
        asked: Any = {
            "model": model,
            "messages": messages,
            "tools": FUNCTIONS,
            "store": True,
            "reasoning_effort": "low",
        }
        message: Any = client.chat.completions.create(**asked, verbosity="low", user="me").choices[0].message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls or ():
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""


def openai_responses(url: str, model: str) -> str:
    from openai import OpenAI

    client, said, previous = OpenAI(base_url=f"{url}/v1", api_key=KEY), [{"role": "user", "content": PROMPT}], None
    tools: Any = [{"type": "function", **each["function"]} for each in FUNCTIONS]
    for _ in range(2):
        with client.responses.stream(
            model=model, input=said, tools=tools, previous_response_id=previous, reasoning={"effort": "low"}
        ) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        if not (calls := [each for each in response.output if each.type == "function_call"]):
            break
        results = [(each.call_id, TOOLS[each.name](**json.loads(each.arguments))) for each in calls]
        said = [{"type": "function_call_output", "call_id": id, "output": result} for id, result in results]
        previous = response.id
    return str(response.output_text)


def anthropic(url: str, model: str) -> str:
    from anthropic import Anthropic, beta_tool

    client = Anthropic(base_url=url, api_key=KEY)
    tools = [beta_tool(each) for each in TOOLS.values()]
    thinking: Any = {"type": "adaptive"}
    messages: Any = [{"role": "user", "content": PROMPT}]
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=4096, thinking=thinking, messages=messages, tools=tools
    )
    return str(list(runner)[-1].content[-1].text)


def openai_agents(url: str, model: str) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    texts = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        made = kind(model=model, openai_client=client)
        agent = Agent(
            name="one", instructions="Be brief.", tools=[function_tool(each) for each in TOOLS.values()], model=made
        )
        texts.append(Runner.run_sync(agent, PROMPT).final_output)
    return str(texts[-1])


def pydantic_ai(url: str, model: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(model, provider=provider), system_prompt="Be brief.", tools=list(TOOLS.values()))
        text = agent.run_sync(PROMPT).output
    return str(text)


def langchain(url: str, model: str) -> str:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    tools = {name: tool(each) for name, each in TOOLS.items()}
    llm = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY).bind_tools(list(tools.values()), strict=True)
    said: list[Any] = [SystemMessage("Be brief."), HumanMessage(PROMPT, name="ann")]
    for _ in range(2):
        said.append(llm.invoke(said))
        if not said[-1].tool_calls:
            break
        said += [
            ToolMessage(tools[each["name"]].invoke(each["args"]), tool_call_id=each["id"])
            for each in said[-1].tool_calls
        ]
    return str(said[-1].content)


def langgraph(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    llm = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY)
    agent = create_react_agent(llm, list(TOOLS.values()), name="worker", prompt="Be brief.")
    first = agent.invoke({"messages": [("user", PROMPT)]})
    later = agent.invoke({"messages": [*first["messages"], ("system", "The date has changed."), ("user", "Go on.")]})
    return str(later["messages"][-1].content)


def litellm(url: str, model: str) -> str:
    import litellm as client

    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    for _ in range(2):
        asked = {"model": f"openai/{model}", "messages": messages, "tools": FUNCTIONS}
        message = client.completion(**asked, api_base=f"{url}/v1", api_key=KEY).choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return str(message.content)


def instructor(url: str, model: str) -> str:
    import instructor as client
    from openai import OpenAI
    from pydantic import BaseModel

    class read_file(BaseModel):  # noqa: N801  # its name is the tool's
        """A file."""

        path: str

    made = client.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY))
    found = made.chat.completions.create(
        model=model, response_model=read_file, messages=[{"role": "user", "content": PROMPT}]
    )
    called.append("read_file")
    return str(found.path)


def smolagents(url: str, model: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    made = OpenAIServerModel(model_id=model, api_base=f"{url}/v1", api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(each) for each in TOOLS.values()], model=made, max_steps=2, verbosity_level=0)
    return str(agent.run(PROMPT))


def dspy(url: str, model: str) -> str:
    import dspy as client

    called.append("none")
    return str(client.LM(f"openai/{model}", api_base=f"{url}/v1", api_key=KEY, cache=False)(PROMPT)[0])


def llama_index(url: str, model: str) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    called.append("none")
    llm = OpenAILike(model=model, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, context_window=9999)
    pieces = llm.stream_chat(
        [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=PROMPT)]
    )
    return "".join(piece.delta or "" for piece in pieces)


def ollama(url: str, model: str) -> str:
    from ollama import Client

    client, messages = Client(host=url), [{"role": "user", "content": PROMPT}]
    for _ in range(2):
        message: Any = client.chat(model=model, messages=messages, tools=list(TOOLS.values())).message
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls or ():
            result = TOOLS[call.function.name](**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    return message.content or ""


CLIENTS: dict[str, Callable[[str, str], str]] = {
    each.__name__: each
    for each in (
        openai_chat, openai_responses, anthropic, openai_agents, pydantic_ai, langchain, langgraph, litellm, instructor,
        smolagents, dspy, llama_index, ollama,
    )
}  # fmt: skip

if __name__ == "__main__":
    name, url, model, *plain = sys.argv[1:]
    if plain:
        PROMPT = PLAIN
        TOOLS.clear()
        FUNCTIONS.clear()
    text = CLIENTS[name](url, model)
    print(json.dumps({"called": called, "text": text}))
