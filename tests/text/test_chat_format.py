"""Forms of messages, calls and reasoning, in templates that do what published ones do."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any

import pytest

from kvasir.model.template.chat_template import ChatTemplate, ChatTemplateError
from kvasir.server.text.chat_format import ChatFormat
from kvasir.server.text.reasoning import ReasoningFormat as Think
from kvasir.server.text.tool_formats import DEEPSEEK_TAGS, KIMI_TAGS
from kvasir.server.text.tool_formats import ToolCallFormat as Form
from tests.kit.chat_templates import by_transformers
from tests.text.test_tool_calls import read

BEGIN, CALL, SEP, CALL_END, END = DEEPSEEK_TAGS
TURN = "{{ '<|' + m.role + '|>' }}"
# Content that is null, and only then calls, whose arguments are text.
R1_DISTILL = f"""\
{{% for m in messages %}}
{{% if m.role == 'assistant' and m['content'] is none %}}
{{% for call in m.tool_calls %}}
{{{{ '{BEGIN}{CALL}' + call.type + '{SEP}' + call.function.name + '\\n```json\\n' }}}}
{{{{- call.function.arguments + '\\n```{CALL_END}{END}' }}}}
{{% endfor %}}
{{% elif m.role == 'assistant' %}}
{{{{ '<|assistant|>' + m['content'].split('</think>')[-1] }}}}
{{% else %}}{TURN}{{{{ m['content'] }}}}{{% endif %}}
{{% endfor %}}
{{% if add_generation_prompt %}}<|assistant|>
<think>
{{% endif %}}"""
DEEPSEEK_V31 = f"""\
{{% for m in messages %}}{TURN}
{{% if m.tool_calls is defined and m.tool_calls is not none %}}</think>
{{%- for call in m.tool_calls %}}
{{{{- ('{BEGIN}' if loop.first else '') + '{CALL}' + call.function.name + '{SEP}' }}}}
{{{{- call.function.arguments | tojson }}}}{CALL_END}
{{%- endfor %}}{END}
{{%- else %}}{{{{ m.content }}}}{{% endif %}}
{{% endfor %}}
{{% if add_generation_prompt %}}<|assistant|>{{{{ '<think>' if thinking else '</think>' }}}}
{{% endif %}}"""
# Ids of nine characters, and turns that alternate.
MISTRAL = """\
{% for m in messages if m.role == 'user' %}
{% if m.tool_calls %}{{ raise_exception('a user calls nothing') }}{% endif %}
{% endfor %}
{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for m in messages %}
{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{% elif m.tool_calls is defined and m.tool_calls is not none %}
[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}
{{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']</s>' }}
{%- endfor %}
{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}
{% elif m.role == 'tool' %}
{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}
[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]
{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}
{% else %}{{ raise_exception('no such role') }}{% endif %}
{% endfor %}"""
MISTRAL_ARGS = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{% if m.content is string %}{{ m.content }}{% elif m.content %}{{ m.content[0].text }}{% endif %}
{% for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}
{%- endfor %}</s>
{% else %}[{{ m.role }}]{{ m.content }}{% endif %}
{% endfor %}
{# [THINK] and [/THINK] #}"""
# Reads the content of every answer; its prompt begins like a call.
QWQ = """\
{% for m in messages %}
{% if m.role == 'assistant' %}
{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + content }}{% endif %}
{% for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# Shows tools, and renders no call.
SMOLLM3 = """\
{% if tools %}<|im_start|>system
Return a json object within <tool_call></tool_call> tags. <tools>{{ tools }}</tools><|im_end|>
{% endif %}
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not enable_thinking | default(true) %}{{ '<think>\\n</think>' }}
{%- endif %}{{ m.content if m.content is string else '' }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking | default(true) %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}
{% endif %}"""
GRANITE = """\
{% if tools %}Respond with <|tool_call|> and a JSON list. {{ tools | tojson }}{% endif %}
{% for m in messages %}
{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}
{% endfor %}"""
QWEN_CODER = """\
{% if tools %}Call as in <tool_call><function=example></function></tool_call>.{% endif %}
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{% for call in m.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}"""
PYTHONIC = """\
{% for m in messages %}{{ '<|h|>' + m.role + '<|/h|>\\n\\n' }}
{%- if m.tool_calls %}[
{%- for call in m.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}="{{ value }}"
{%- endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]
{%- else %}{{ m.content }}{% endif %}<|eot|>
{% endfor %}
{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}"""
# The turns of published templates around calls as each family writes them.
AROUND = """\
{% macro text(value) %}{{ value if value is string else value | tojson }}{% endmacro %}
{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{{ m.content or '' }}
{%- if m.tool_calls %}CALLS{% endif %}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}{# REASONING #}"""
EACH = "{% for call in m.tool_calls %}"
PAIRS = "{% for key, value in call.function.arguments | items %}"
LISTED = "{{ m.tool_calls | map(attribute='function') | list | tojson }}"
COMMA = "{{ ', ' if not loop.last else '' }}"
NAME = "{{ call.function.name }}"
_, KIMI_BEGIN, KIMI_ARGUMENTS, KIMI_END, _ = KIMI_TAGS
WRITTEN = {  # calls and the tag of reasoning, of templates published in 2025 and 2026
    Form.GLM: (
        f"{EACH}\n<tool_call>{NAME}{PAIRS}\n<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>"
        "{{ text(value) }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}",
        "</think>",
    ),
    Form.KIMI: (
        f"{KIMI_TAGS[0]}{EACH}{KIMI_BEGIN}functions.{NAME}:{{{{ loop.index0 }}}}{KIMI_ARGUMENTS}"
        f"{{{{ text(call.function.arguments) }}}}{KIMI_END}{{% endfor %}}{KIMI_TAGS[4]}",
        "</think>",
    ),
    Form.MINIMAX: (
        f'\n<minimax:tool_call>{EACH}\n<invoke name="{NAME}">{PAIRS}\n<parameter name="'
        '{{ key }}">{{ text(value) }}</parameter>{% endfor %}\n</invoke>{% endfor %}\n'
        "</minimax:tool_call>",
        "</think>",
    ),
    Form.SEED: (
        f"{EACH}\n<seed:tool_call>\n<function={NAME}>{PAIRS}\n<parameter={{{{ key }}}}>"
        "{{ text(value) }}</parameter>{% endfor %}\n</function>\n</seed:tool_call>{% endfor %}",
        "</seed:think>",
    ),
    Form.NEMOTRON: (f"<TOOLCALL>{LISTED}</TOOLCALL>", "</think>"),
    Form.HUNYUAN: (f"<tool_calls>\n{LISTED}\n</tool_calls>", "</think>"),
    Form.LFM: (
        f"<|tool_call_start|>[{EACH}{NAME}({PAIRS}{{{{ key }}}}={{{{ value | tojson }}}}"
        f"{COMMA}{{% endfor %}}){COMMA}{{% endfor %}}]<|tool_call_end|>",
        "</think>",
    ),
    Form.GEMMA: (
        f"{EACH}<|tool_call>call:{NAME}{{{{ '{{' }}}}{PAIRS}{{{{ key }}}}:<|\"|>{{{{ value }}}}"
        f"<|\"|>{COMMA}{{% endfor %}}{{{{ '}}' }}}}<tool_call|>{{% endfor %}}",
        "<channel|>",
    ),
}
TAGS = {form.closing: form for form in Think}
TEMPLATES: list[tuple[str, str, Form, Think | None]] = [
    ("r1-distill", R1_DISTILL, Form.DEEPSEEK, Think.THINK),
    ("deepseek 3.1", DEEPSEEK_V31, Form.DEEPSEEK_V31, Think.THINK),
    ("mistral", MISTRAL, Form.MISTRAL, None),
    ("devstral", MISTRAL_ARGS, Form.MISTRAL_ARGS, Think.MISTRAL),
    ("qwq", QWQ, Form.HERMES, Think.THINK),
    ("smollm3", SMOLLM3, Form.HERMES, Think.THINK),
    ("granite", GRANITE, Form.GRANITE, None),
    ("qwen coder", QWEN_CODER, Form.QWEN_CODER, None),
    ("pythonic", PYTHONIC, Form.PYTHONIC, None),
]
TEMPLATES += [
    (
        form.name.lower(),
        AROUND.replace("CALLS", calls).replace("REASONING", closing),
        form,
        TAGS[closing],
    )
    for form, (calls, closing) in WRITTEN.items()
]
SILENT = (SMOLLM3, GRANITE)  # they render no call
USER = {"role": "user", "content": "Hi"}


@cache
def chat_of(source: str) -> ChatFormat:
    return ChatFormat(ChatTemplate(source))


@pytest.mark.parametrize(
    ("source", "calls", "reasoning"),
    [one[1:] for one in TEMPLATES],
    ids=[one[0] for one in TEMPLATES],
)
def test_formats_are_found(source: str, calls: Form, reasoning: Think | None) -> None:
    assert (chat_of(source).tool_calls, chat_of(source).reasoning) == (calls, reasoning)


def test_a_format_may_be_named() -> None:
    chat = ChatFormat(ChatTemplate(QWQ), "llama", "none")
    assert (chat.tool_calls, chat.reasoning) == (Form.LLAMA, None)


@pytest.mark.parametrize("source", [one[1] for one in TEMPLATES], ids=[one[0] for one in TEMPLATES])
def test_a_message_that_only_calls_is_rendered(source: str) -> None:
    """With content of any form that clients send, with any id, and with arguments of either."""
    call_id = "call_0123456789abcdef01234567"
    result = {"role": "tool", "content": "12 C", "tool_call_id": call_id}
    contents: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]
    for content, arguments in product(contents, [{"city": "Ulm"}, '{"city": "Ulm"}']):
        function = {"name": "f", "arguments": arguments}
        calls = [{"id": call_id, "type": "function", "function": function}]
        calling = {"role": "assistant", **content, "tool_calls": calls}
        text = chat_of(source).render([USER, calling, result])
        assert "12 C" in text
        assert ("Ulm" in text) is (source not in SILENT)
        assert "None" not in text
        assert "{'city'" not in text


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name.lower())
def test_calls_are_rendered_as_transformers_renders_them(form: Form) -> None:
    source = next(source for _, source, of, _ in TEMPLATES if of is form)
    function = {"name": "f", "arguments": {"city": 'Ulm "é"', "more": "<b>"}}
    calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}] * 2}
    messages: list[dict[str, Any]] = [USER, calling, {"role": "tool", "content": "12 C"}]
    ours = ChatTemplate(source).render(messages, add_generation_prompt=True)
    assert ours == by_transformers(source, messages, add_generation_prompt=True)
    content, calls = read(
        form, [ours[ours.index("<|assistant|>") + 13 : ours.index("<|end|>", 30)]]
    )
    assert not content.strip()
    assert [json.loads(arguments) for _, arguments in calls] == [function["arguments"]] * 2


def test_roles_are_those_of_the_template() -> None:
    other = {"role": "critic", "content": "No."}
    with pytest.raises(ChatTemplateError, match="critic"):
        ChatFormat(ChatTemplate(MISTRAL)).render([USER, other])
    named = MISTRAL.replace("m.role == 'system'", "m.role in ['system', 'critic']")
    for source in (named, GRANITE):  # which shows any role
        assert "No." in ChatFormat(ChatTemplate(source)).render([USER, other])


def test_a_prompt_may_begin_the_reasoning_or_end_it() -> None:
    for source, options, begun, over in (
        (QWQ, {}, True, False),
        (SMOLLM3, {}, False, False),
        (SMOLLM3, {"enable_thinking": False}, False, True),
        (DEEPSEEK_V31, {}, False, True),
        (DEEPSEEK_V31, {"thinking": True}, True, False),
        ("{{ 'a<|channel>thought' }}\n{# <channel|> #}", {}, True, False),
    ):
        chat = chat_of(source)
        prompt = chat.render([USER], add_generation_prompt=True, **options)
        assert chat.reasoning is not None
        assert chat.reasoning.is_begun(prompt) is begun
        assert chat.reasoning.is_over(prompt) is over


def test_a_system_message_inside_the_conversation_is_shown_by_every_template() -> None:
    """Claude Code sends one after the first turn; many templates take it first or nowhere."""
    user: dict[str, Any] = {"role": "user", "content": "a"}
    system: dict[str, Any] = {"role": "system", "content": "b"}
    turn = [{"type": "text", "text": "c"}]
    messages = [system, user, system, {"role": "user", "content": turn}]
    free = "{% for m in messages %}{{ m.role[0] }}>{{ m.content }} {% endfor %}"
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('only first') }}{% endif %}{{ m.role[0] }}>{{ m.content }} {% endfor %}"
    )
    silent = (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
        "{{ m.role[0] }}>{{ m.content }} {% endif %}{% endfor %}"
    )
    assert ChatFormat(ChatTemplate(free)).render(messages) == "s>b u>a s>b u>c "
    for source in (strict, silent):
        assert ChatFormat(ChatTemplate(source)).render(messages) == "s>b u>a\nb\nc "
        assert ChatFormat(ChatTemplate(source)).render([user, system]) == "u>a\nb "
