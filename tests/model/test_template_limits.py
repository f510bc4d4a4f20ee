"""Chat templates that would take the server's time or memory are ended; others are not changed."""

from __future__ import annotations

import pytest

from kvasir.model.template import process as template_process
from kvasir.model.template.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ChatTemplateLimitError,
)
from kvasir.model.template.process import MOST_TEXT

GROW = "{% set n = namespace(x='xx', y=(1,), z=(1,)) %}{% for i in range(60) %}"
LISTS = GROW + "{% set n.y = (n.y, n.y) %}{% set n.z = (n.z, n.z) %}{% endfor %}"
ATTACKS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "plain text": "{% for i in range(99999) %}" + "a" * 10_000 + "{% endfor %}",
    "times": "{% set n = namespace(x='x') %}{% set n.x = n.x * 10 ** 9 %}",
    "plus": GROW + "{% set n.x = n.x + n.x %}{% endfor %}",
    "power": "{% set n = 10 ** 9 %}{{ n ** n }}",
    "a method": "{{ messages[0].content.ljust(10 ** 9) }}",
    "a filter": "{{ messages[0].content | center(10 ** 9) }}",
    "a slow filter": "{{ (messages[0].content * 900000) | wordwrap(1) }}",
    "a format": "{{ '%*d' % (10 ** 9, messages | length) }}",
    "lists as JSON": LISTS + "{{ n.y | tojson | length }}",
    "lists compared": LISTS + "{{ n.y == n.z }}",
}
CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_template_that_grows_without_end_is_ended(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateLimitError, match="cannot render this: it takes") as caught:
        template.render(CHAT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "1+" * 20_000 + "1 }}",
        "{{x}}" * 50_000,
        "{{ ('a' * 900000) | wordwrap(1) }}",  # constant, so it is computed by the compilation
        "a" * 300_000,
    ],
    ids=["parentheses", "ifs", "blocks", "sum", "variables", "constant", "length"],
)
def test_a_template_too_large_to_compile_is_refused_in_one_line(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template is not valid: ") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(ChatTemplateError, match=r"cannot render this: .*surrogates not allowed"):
        ChatTemplate("{{ '\\ud800' }}").render(CHAT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages | length ~ '-' ~ none ~ undefined_name }}", "501-None"),
        ("{% for a, b in [(messages, 1)] %}{{ a | length + b }}{% endfor %}", "502"),
        ("{% for m in messages if m.role %}{{ m.role[0] }}{% endfor %}", "u" * 501),
        (
            "{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m] %}"
            "{% endfor %}{{ n.x[-1].role }}",
            "user",
        ),
        ("{{ messages[0].content.replace('<', '&lt;') | trim | length }}", "1499999"),
        (
            "{% for m in messages %}{% set x = m.content %}{{ x.endswith('</z>') | int }}"
            "{% endfor %}",
            "0" * 501,
        ),
    ],
)
def test_a_long_chat_is_rendered(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "<xyz " * 187_500}, *CHAT * 500]
    assert ChatTemplate(source).render(messages) == expected


def test_a_text_of_more_characters_than_any_chat_needs_is_refused() -> None:
    source = "{{ messages[0].content * 17 }}"
    with pytest.raises(ChatTemplateError, match=f"text of more than {MOST_TEXT:,} characters"):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 2**20}])


def test_a_process_that_was_ended_or_has_grown_is_replaced() -> None:
    """The end of one that waits is no fault of the template; memory is given back."""
    template = ChatTemplate("{{ messages[0].content | length }}")
    for content in ("x", "x" * 2**25):
        assert template.render([{"role": "user", "content": content}]) == str(len(content))
        for waiting in template_process._idle:
            waiting.process.kill()
            waiting.process.wait()
    assert all(waiting.process.poll() is not None for waiting in template_process._idle)
    assert template.render(CHAT) == "1"


def test_a_process_is_used_again_whatever_this_one_takes() -> None:
    """getrusage(2) in a process counts the memory of its parent as well."""
    held = b"x" * 2**26
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(CHAT) == "1"
    waiting = template_process._idle[-1]
    assert template.render(CHAT) == "1"
    assert template_process._idle[-1] is waiting
    assert held
