"""Chat templates: what transformers renders, and no more time or memory than a rendering needs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.seeded import write_tokenizer
from tokamac.engine import Message, TemplateError
from tokamac.engine.text.template import LONGEST_TEMPLATE, ChatTemplate, with_deadline
from tokamac.engine.text.tokenizer import load_tokenizer

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is <b>prefill</b>? "},
    {"role": "assistant", "content": "It reads the prompt.", "reasoning_content": "hm\n"},
    {"role": "user", "content": "Überlegt & 中 'quoted'"},
]

# In the manner of published ones: what they use of Jinja, each at least once.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "namespace": """{%- set ns = namespace(last=-1, multi=true) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi and m.role == "user" %}{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.reasoning_content is defined and m.reasoning_content is not none -%}
<think>{{ m.reasoning_content | trim }}</think>{% endif %}
    {{- m.content.split('</b>')[-1].lstrip('\\n') ~ loop.index0 ~ (loop.index0 > ns.last) }}
{%- endfor %}""",
    "macro": """{%- macro turn(role, text, sep='|') -%}
[{{ role | upper }}]{{ sep }}{{ text | trim | replace('prefill', 'decode') }}{{ sep * 2 }}
{%- endmacro -%}
{%- if messages[0].role == 'system' %}{{ turn('sys', messages[0].content) }}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages if m.role != 'tool' %}
{%- if loop.index > 9 %}{% break %}{% endif %}{{ turn(m.role, m.content, sep='/') }}{% endfor %}""",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{% set t = tools or [] %}{{ t | length }}"
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ bos_token }}{{ m.content }}{% endif %}{% endfor %}",
    "thinking": "{% for m in messages %}{% if m.thinking %}<a>{{ m.thinking }}</a>{% endif %}{{ m['content'] }}{% endfor %}",
    "format": "{{ '%s: %d' % ('n', messages | length) }}{{ '{} {}'.format('a', 'b') }}{{ (7 * 6) ~ ' ' ~ 7 // 2 ~ ' ' ~ 5 % 3 }}"
    "{{ ['b', 'a'] | sort | join('-') }}{{ {'x': 1}.items() | list }}{{ dict(a=1)['a'] }}{{ range(3) | list }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("reply", [True, False])
def test_it_renders_what_transformers_renders(tmp_path: Path, name: str, reply: bool) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    expected = theirs.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=reply)
    ours = ChatTemplate(theirs.get_chat_template(), theirs.special_tokens_map)
    assert ours.render(TURNS, reply=reply) == expected


@pytest.mark.parametrize("said", ["It reads", " It reads ", "It reads\n"])
@pytest.mark.parametrize("name", ["chatml", "macro", "thinking"])
def test_a_reply_is_cut_where_transformers_cuts_it(tmp_path: Path, name: str, said: str) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, template=TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    turns = [*TURNS[:2], {"role": "assistant", "content": said, "reasoning_content": "hm"}]
    ours = ChatTemplate(theirs.get_chat_template(), theirs.special_tokens_map)
    fields = ["content", "reasoning_content"] if name == "thinking" else ["content"]
    for field in fields:
        expected = theirs.apply_chat_template(turns, tokenize=False, continue_final_message=field)
        assert ours.render(turns, reply=False, cut=field) == expected


def test_a_template_that_leaves_out_what_is_cut_says_so() -> None:
    with pytest.raises(TemplateError, match="leaves out"):
        ChatTemplate("{{ messages[0].content }}", {}).render(TURNS[:3], reply=False, cut="content")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = [
    "{{ 9 ** +9 ** 9 }}",
    "{{ 9 ** (messages | length * 100000000) }}",
    "{% set n = namespace(x=7) %}{% for i in range(90000) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ 'a' * 700000000 }}",
    "{{ 700000000 * 'a' }}",
    "{{ [0] * 700000000 }}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "{% set n = namespace(l='a') %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    "{% set n = namespace(l='a') %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}",
    "{% set n = namespace(l='a') %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | string }}",
    "{% set n = namespace(l='a') %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ 'x' ~ n.l }}",
    "{% set n = namespace(l='a') %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ '%s' % [n.l] }}",
    "{% set n = namespace(l='a') %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ '{}'.format(n.l) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}"
    + "a" * 999
    + "{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set b %}{% for i in range(90000) %}" + "a" * 9999 + "{% endfor %}{% endset %}{{ b }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a'.ljust(10 ** 3) }}",
    "{{ ('\t' * 99999).expandtabs(999999) }}",
    "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "{{ ('b' * 999999).join('a' * 999999) }}",
    "{{ ('a' * 999999) | join('b' * 999999) }}",
    "{{ ('\n' * 999999) | indent(999999) }}",
    "{{ ('\n' * 999999) | indent('a' * 999999) }}",
    "{{ 'a'.translate({97: 'b' * 99999}) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, '1000000000') }}",
    "{{ '{0:>{w}}'.format('a', w='1000000000') }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.1000000000f' % 1.0 }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ [['a' * 9999] * 99999] | sum(start=[]) }}",
    "{{ ['a' * 9999999] * 99999 | sort }}",
    "{{ range(100000) | list | batch(2, 'x') | list | string * 99999 }}",
    LOOPS,
    "{% for a in range(99999) %}{% set x = 'a' * 999999 %}{% endfor %}",
    "{{ lipsum(n=99999999) }}",
    "{{ 'a' | center(99999999) }}",
    "{{ 'http://a' | urlize(99999999) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages[0].content.__class__ }}{{ nothing.at.all() }}",
    "{{ namespace(__class__=1) }}",
    "{{ raise_exception('\x1b[31mred') }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a" * (LONGEST_TEMPLATE + 1),
]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_deadline, "__defaults__", (1.0,))


def test_no_template_takes_what_a_rendering_does_not_need(tmp_path: Path) -> None:
    """In a process of its own, so that what a fault takes is bounded: 2 GB of addresses beyond its own, and 150 s."""
    file = tmp_path / "hostile.json"
    file.write_text(json.dumps([HOSTILE, TURNS]))
    code = """
import json, resource, sys
from tokamac.engine import TemplateError
from tokamac.engine.text.template import ChatTemplate, with_deadline
with_deadline.__defaults__ = (1.0,)
templates, turns = json.load(open(sys.argv[1]))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
if size:
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30),) * 2)
for template in templates:
    try:
        text = ChatTemplate(template, {}).render(turns, reply=True)
        print("rendered", len(text))
    except MemoryError:
        print("memory")
    except Exception as error:
        print("refused", type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=150, check=True
    )
    said = dict(zip(HOSTILE, done.stdout.splitlines(), strict=True))
    assert {template: what for template, what in said.items() if not what.startswith("refused")} == {}


def test_a_long_conversation_has_budget(soon: None) -> None:
    turns = [{"role": "user", "content": "words " * 100_000}] * 3
    text = ChatTemplate(TEMPLATES["chatml"], {}).render(turns, reply=True)
    assert text.count("words") == 300_000


def test_loops_end_at_the_deadline(soon: None) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateError, match="did not end"):
        ChatTemplate(LOOPS, {}).render(TURNS, reply=True)
    assert time.monotonic() - began < 60  # it ended at all


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_any_text_is_rendered_as_it_is(texts: list[str]) -> None:
    turns = [{"role": "user", "content": text} for text in texts]
    assert ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}).render(
        turns, reply=False
    ) == "".join(f"[{text}]" for text in texts)


def test_a_template_that_is_none_says_so_when_it_is_used(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{% if %}")
    tokenizer = load_tokenizer(tmp_path, {}, "tiny")
    with pytest.raises(TemplateError, match="tiny failed"):
        tokenizer.render([Message("user", "hi")])
