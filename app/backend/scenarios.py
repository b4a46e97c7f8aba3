"""What the scripted engine can be asked to play: a name, as of a model, and how it behaves. Plain values."""

from dataclasses import dataclass

ANSWER = """Decode reads **every weight once per token**, so its speed is set by memory, not by arithmetic.

1. Prefill multiplies the whole prompt at once: *bound by arithmetic*.
2. Decode multiplies one token: *bound by bandwidth*.

```python
ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step
```

| phase | bound by | helped by |
| --- | --- | --- |
| prefill | arithmetic | a prompt cache |
| decode | bandwidth | 4-bit weights, a smaller `KV` cache |

> The first question about a slow reply is which phase was slow.
"""
THOUGHT = (
    "The user asks about decode. Each step reads all weights, so bandwidth is the limit. Explain with the two phases. "
)

LINES = (
    "Decode reads **every weight once per token**, so its speed is set by memory, not by arithmetic. The chip waits for bytes.",
    "Prefill is the other way round: the whole prompt goes through at once, and the *arithmetic* units are the ones that are busy.",
    "Between the two stands the cache of keys and values. It is read whole at every step, and can be packed into `8` or `4` bits.",
)
PROSE = "\n\n".join(LINES * 24)
"""Paragraphs of some 30 tokens each, 2,200 tokens in all."""
FUNCTION = '''def decode_{0}(weights: list[float], width: int = {0}) -> float:
    """Multiply, add, and say how long it took; case {0}."""
    total, began = 0.0, time.monotonic()
    for index, weight in enumerate(weights):
        if index % width == 0 and weight > {0}.5:
            total += weight * math.sqrt(index + 1)  # what travels is read once
    return total / max(1e-9, time.monotonic() - began)
'''
CODE = "```python\n" + "\n\n".join(FUNCTION.format(number) for number in range(20)) + "```\n"
"""One long block, 2,000 tokens."""
LIST = "".join(f"- item **{i}** of a long list, with a few words in it\n" for i in range(300))
"""4,000 tokens."""
TITLE = "Title: **Where decode spends its time.**"
"""Also what it says after its first word, with which the chat has it begin when it asks for a title."""
FAST_S = 1 / 500
"""Between tokens, at the rate that the benchmarks ask the screen to keep up with."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a scripted model does; all delays in seconds."""

    answer: str = ANSWER
    thinking: str = ""
    gap_s: float = 0.004
    prefill_steps: int = 4
    prefill_step_s: float = 0.01
    prompt_tokens: int = 0  # besides those of the conversation
    load_steps: int = 0
    load_step_s: float = 0.1
    load_error: str = ""
    packs: bool = True  # keys and values; else loading with them packed fails
    dies_on: str = ""  # load, send, decode, idle
    freezes_on: str = ""  # send: the whole process stops, its heartbeat too
    deaf: bool = False  # does not hear cancel
    context: int = 32_768
    rolls: bool = False
    trouble: str = ""  # with the prompt cache, after the first reply or what was read ahead
    advice: str | None = None  # on the installation, with the model


SCENARIOS = {
    "guide": Scenario(),
    "fast": Scenario(gap_s=0.0, prefill_step_s=0.0),
    "slow": Scenario(gap_s=0.08, prefill_step_s=0.05),
    "steady": Scenario(gap_s=0.02),
    "thinking": Scenario(thinking=THOUGHT * 2, gap_s=0.03),
    "prefill": Scenario(prefill_steps=40, prefill_step_s=0.1, prompt_tokens=20_000),
    "prose": Scenario(answer=PROSE, gap_s=FAST_S),
    "code": Scenario(answer=CODE, gap_s=FAST_S),
    "list": Scenario(answer=LIST, gap_s=FAST_S),
    "hostile": Scenario(answer="before \x1b]52;c;ZWNobw==\x07 [bold]not markup[/] \x1b[2J\u202eafter <b>html</b>"),
    "slow-load": Scenario(load_steps=20),
    "entitles": Scenario(answer=TITLE, gap_s=0.0, prefill_step_s=0.0),
    "entitles-slowly": Scenario(answer=TITLE, gap_s=0.3, prefill_step_s=0.0),
    "missing": Scenario(load_error="no model is called 'missing'"),
    "unpackable": Scenario(packs=False),
    "dies-loading": Scenario(load_steps=2, dies_on="load"),
    "dies-idle": Scenario(dies_on="idle"),
    "dies-sending": Scenario(dies_on="send"),
    "dies-decoding": Scenario(gap_s=0.01, dies_on="decode"),
    "freezes": Scenario(freezes_on="send"),
    "deaf": Scenario(gap_s=0.05, deaf=True, answer=ANSWER * 10),
    "tiny-context": Scenario(context=8),
    "rolling": Scenario(context=64, rolls=True),
    "old-wheel": Scenario(gap_s=0.0, prefill_step_s=0.0, advice="The installed MLX leaves the accelerators unused."),
    "full-disk": Scenario(
        gap_s=0.0, prefill_step_s=0.0, trouble="the prompt cache can't be written \x1b[2J(disk full)"
    ),
}
