"""Chat templates that would take the server's time or memory are ended; others are not changed."""

from __future__ import annotations

import pytest

from model.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimitError
from model.template_limits import MOST_SECONDS, MOST_TEXT, Allowance

GROW = "{% set n = namespace(x='xx', y=(1,), z=(1,)) %}{% for i in range(60) %}"
LISTS = GROW + "{% set n.y = (n.y, n.y) %}{% set n.z = (n.z, n.z) %}{% endfor %}"
ATTACKS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops over tests": "{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "plain text": "{% for i in range(99999) %}" + "a" * 10_000 + "{% endfor %}",
    "a block": "{% set x %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
    "times": "{{ 'x' * 10 ** 9 }}",
    "plus": GROW + "{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": GROW + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "power": "{{ 10 ** 10 ** 10 }}{% set n = namespace(x=9) %}"
    "{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a power of a variable": "{% set n = 10 ** 9 %}{{ n ** n }}",
    "a method": "{{ 'x'.ljust(10 ** 9) }}",
    "replace": GROW + "{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "a filter": "{{ 'x' | center(10 ** 9) }}",
    "join": "{{ range(99999) | map('center', 99999) | join }}",
    "join of one text": "{{ (['x' * 99999] * 99999) | join }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a width": "{{ '%*d' % (10 ** 9, 1) }}",
    "format": "{{ '{:x>1000000000}'.format(1) }}",
    "format with a width": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "the filter format": "{{ '%.1000000000f' | format(1.5) }}",
    "lists written": LISTS + "{{ n.y }}",
    "lists as JSON": LISTS + "{{ n.y | tojson | length }}",
    "lists compared": LISTS + "{{ n.y == n.z }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "a digit's power": "{{ 1.5 | round(10 ** 8, 'ceil') }}",
}
CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_template_that_grows_without_end_is_ended(source: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateLimitError, match="cannot render this: it ") as caught:
        template.render(CHAT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "1+" * 20_000 + "1 }}",
        "a" * 300_000,
    ],
    ids=["parentheses", "ifs", "blocks", "sum", "length"],
)
def test_a_template_too_large_for_python_is_refused_in_one_line(source: str) -> None:
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


def test_the_largest_chat_gets_no_more_time_or_text_than_a_request_may_use() -> None:
    content = "x" * 2**22
    allowance = Allowance({"messages": [{"role": "user", "content": content}]})
    assert (allowance.seconds, allowance.left) == (MOST_SECONDS, MOST_TEXT)
    source = "{% for i in range(9) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(ChatTemplateLimitError, match=r"texts of more than 33,554,432 characters"):
        ChatTemplate(source).render([{"role": "user", "content": content}])
