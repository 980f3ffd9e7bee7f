"""A template renders conversations, and a hostile one gets nowhere."""

from __future__ import annotations

import pytest

from dataplane.frontend.chat_template import ChatTemplate, TemplateError, TemplateLimitError
from tests.dataplane.frontend.conftest import CHAT
from veneer.errors import InvalidArgumentError

HELLO = [{"role": "user", "content": "hello <b> {{ 7 * 7 }}"}]
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}"


def test_a_conversation_ends_where_the_assistant_speaks() -> None:
    text = ChatTemplate(CHAT, {}).render(HELLO)
    assert text == "<|im_start|>user\nhello <b> {{ 7 * 7 }}<|im_end|>\n<|im_start|>assistant\n"


def test_the_language_of_common_templates_is_there() -> None:
    source = (
        "{%- set ns = namespace(first=true) -%}{{- bos_token -}}"
        "{%- for message in messages -%}"
        "{%- if message.role not in ['user', 'assistant', 'system'] -%}{%- continue -%}{%- endif -%}"
        "{%- if ns.first %}[{% set ns.first = false %}{% endif -%}"
        "{{- message['role'] ~ ':' ~ message.content | trim -}}{{- ',' if not loop.last else ']' -}}"
        "{%- endfor -%}"
        "{{- messages[0] | tojson -}}{{- messages[1:] | length -}}{%- if tools is not none -%}tools{%- endif -%}"
    )
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hé"}]
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
    assert text == '<s>[system:be brief,user:hé]{"role": "system", "content": " be brief "}1'


def test_a_conversation_that_the_template_refuses_is_the_callers_fault() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidArgumentError, match="roles must alternate") as caught:
        template.render(HELLO)
    assert caught.value.violations[0].field == "chat.messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | nosuchfilter }}", "{% for a in b recursive %}{{ loop(a) }}{% endfor %}"])
def test_what_is_no_template_is_refused_at_start(source: str) -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ 'a'.ljust(10) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(HELLO)
    except TemplateError:
        return
    assert text == ""  # what is not allowed is undefined, and undefined is empty


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "{% endfor %}{% endfor %}",
        LOOP + "x{% endfor %}{% endfor %}",
        "{% for i in range(10) %}" * 8 + "{% endfor %}" * 8,
        "{{ range(100000000) | list | length }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%1000000000d' % 1 }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
        "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    ],
)
def test_a_template_cannot_run_or_grow_without_bound(source: str) -> None:
    with pytest.raises(TemplateLimitError):
        ChatTemplate(source, {}, max_characters=1 << 20).render(HELLO)


def test_one_rendering_does_not_use_up_the_budget_of_the_next() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}done", {})
    assert [template.render(HELLO) for _ in range(3)] == ["done"] * 3
