"""Conversations are rendered in processes that end at their limits, and a tenant that reaches them delays itself alone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from dataplane.frontend.chat_template import ChatTemplate, TemplateError, TemplateLimitError, _Places
from tests.dataplane.frontend.conftest import CHAT
from tests.fixtures.descriptors import num_open_files
from veneer.chat.wire import Order
from veneer.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

HELLO = (("user", "hello <b> {{ 7 * 7 }}"),)
BAD = (
    "{% if messages[0].content == 'bad' %}{{ range(99999) | map('string') | join | length * 0 }}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)
"""Goes round in circles for one content, and is well for all others."""


@asynccontextmanager
async def template(
    source: str, *, num_processes: int = 2, max_pending: int = 1024, **limits: float
) -> AsyncIterator[ChatTemplate]:
    order = Order(source, {}, ("<|im_start|>", "<|im_end|>"), **limits)  # type: ignore[arg-type]
    made = ChatTemplate(order, num_processes=num_processes, max_pending=max_pending)
    try:
        yield made
    finally:
        made.close()


async def test_a_conversation_ends_where_the_assistant_speaks() -> None:
    async with template(CHAT) as chat:
        rendered = await chat.render(HELLO, tenant="acme")
    assert rendered.text == "<|im_start|>user\nhello <b> {{ 7 * 7 }}<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.controls is None


async def test_the_places_of_the_templates_control_tokens_are_told_where_contents_have_some() -> None:
    async with template(CHAT) as chat:
        rendered = await chat.render((("user", "<|im_end|>"),), tenant="acme")
    assert rendered.controls is not None
    assert [rendered.text[start:end] for start, end in rendered.controls] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert rendered.controls[1] == (27, 37)


async def test_a_conversation_that_the_template_refuses_is_the_callers_fault() -> None:
    async with template("{{ raise_exception('roles must take turns') }}") as chat:
        with pytest.raises(InvalidArgumentError, match="roles must take turns") as caught:
            await chat.render(HELLO, tenant="acme")
    assert caught.value.violations[0].field == "chat.messages"


@pytest.mark.parametrize(
    ("source", "construct"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ x | nosuchfilter }}", "nosuchfilter"),
        ("{% nosuchtag %}", "nosuchtag"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "chat template"),
        ("{{ 9 ** (9 ** 9) }}", "processor time"),
    ],
)
async def test_what_cannot_be_used_is_named_at_start_and_for_each_conversation(
    source: str, construct: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with template(source) as chat:
        with caplog.at_level(logging.WARNING):
            await chat.start()
        with pytest.raises(TemplateError, match=construct):
            await chat.render(HELLO, tenant="acme")
        assert not chat.pids, "no process is kept for a template that cannot be used"


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
        "{{ messages[0].content._twin }}",
        "{% set n = namespace(_a=1) %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
async def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    async with template(source) as chat:
        try:
            rendered = await chat.render(HELLO, tenant="acme")
        except TemplateError:
            return
    assert rendered.text == ""  # what is not allowed is undefined, and undefined is empty


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for a in x %}" + "{% for i in range(9999) %}" * 5 + "{% endfor %}" * 5 + "{% endfor %}",
        "{{ x * 1000000000 }}",
        "{{ 1000000000 * x }}",
        "{{ [x] * 1000000000 }}",
        "{{ (x | length) ** (9 ** 9) }}",
        "{{ '%1000000000d' % (x | length) }}",
        "{{ '%1000000000d' | format(x | length) }}",
        "{{ '{:1000000000d}'.format(x | length) }}",
        "{{ x.ljust(1000000000) }}",
        "{{ x | center(1000000000) }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s[:] + n.s[:] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{% set s = x * 100000 %}{% for i in range(99999) %}{% set t = s | wordwrap(3) %}{% endfor %}",
        "{% set s = x * 100000 %}{% for i in range(99999) %}{% set t = s | list | sort | unique | list %}{% endfor %}",
        "{{ lipsum(n=100000, html=false) * 100 }}",
    ],
)
async def test_a_template_that_runs_or_grows_without_bound_is_ended_and_the_next_conversation_served(source: str) -> None:
    """`x` is a content, so that nothing of it is computed before a conversation comes."""
    switched = "{% set x = messages[0].content %}{% if x == 'bad' %}" + source + "{% endif %}done"
    async with template(switched, max_cpu_s=0.3, memory_bytes=64 << 20, max_characters=1 << 20) as chat:
        with pytest.raises(TemplateLimitError, match=r"chat template was ended: it (took|made)|process that rendered it ended"):
            await chat.render((("user", "bad"),), tenant="acme")
        assert (await chat.render((("user", "good"),), tenant="acme")).text == "done"


async def test_the_limit_is_named() -> None:
    async with template("{{ messages[0].content * 100 }}", max_characters=99) as chat:
        with pytest.raises(TemplateLimitError, match="longer than 99 characters"):
            await chat.render(HELLO, tenant="acme")
    async with template("{% set x = [0] * (1000000000 + messages | length) %}", memory_bytes=64 << 20) as chat:
        with pytest.raises(TemplateLimitError, match="64 MiB of memory"):
            await chat.render(HELLO, tenant="acme")
    async with template(BAD, max_cpu_s=0.2) as chat:
        with pytest.raises(TemplateLimitError, match=r"0\.2 s of processor time"):
            await chat.render((("user", "bad"),), tenant="acme")


async def test_a_template_opens_no_file_and_no_connection() -> None:
    async with template(CHAT) as chat:
        await chat.start()
        limits = [Path(f"/proc/{pid}/limits").read_text() for pid in chat.pids]
    assert len(limits) == 2
    for text in limits:
        row = next(line for line in text.splitlines() if line.startswith("Max open files"))
        assert row.split()[3:5] == ["0", "0"]


async def test_the_process_has_nothing_of_this_ones_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENEER_DATAPLANE_ENROLLMENT_TOKEN", "secret")
    async with template(CHAT) as chat:
        await chat.start()
        environments = [Path(f"/proc/{pid}/environ").read_text() for pid in chat.pids]
    assert not any("VENEER" in text or "secret" in text for text in environments)


async def test_the_event_loop_goes_on_while_a_template_runs() -> None:
    async with template(BAD, max_cpu_s=0.2) as chat:
        await chat.start()
        rendering = asyncio.create_task(chat.render((("user", "bad"),), tenant="acme"))
        turns = 0
        while not rendering.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(TemplateLimitError):
            await rendering
    assert turns > 100


async def test_tenants_whose_conversations_were_ended_share_one_process_and_all_others_go_on() -> None:
    places = _Places(3, max_pending=100)
    for tenant in ("bad", "worse"):
        places.give_back(await places.take(tenant), tenant, was_ended=True)
    first = await places.take("bad")
    waiting = [asyncio.create_task(places.take(tenant)) for tenant in ("worse", "bad", "worse")]
    await asyncio.sleep(0)
    for tenant in ("good", "better"):
        await places.take(tenant)
    assert not any(task.done() for task in waiting)
    places.give_back(first, "bad", was_ended=True)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False, False], "they go by turns"
    places.give_back(await waiting[0], "worse", was_ended=False)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    waiting[2].cancel()
    await asyncio.gather(waiting[2], return_exceptions=True)
    places.give_back(await waiting[1], "bad", was_ended=False)
    assert await places.take("good") in range(3), "a caller that left is passed over"


async def test_tenants_go_by_turns_however_much_of_one_waits() -> None:
    places = _Places(2, max_pending=100)
    held = [("a", await places.take("a")), ("b", await places.take("b"))]
    order: list[str] = []

    async def wait(tenant: str) -> None:
        place = await places.take(tenant)
        order.append(tenant)
        places.give_back(place, tenant, was_ended=False)

    tasks = [asyncio.create_task(wait(tenant)) for tenant in "aaaaabc"]
    await asyncio.sleep(0)
    for tenant, place in held:
        places.give_back(place, tenant, was_ended=False)
    await asyncio.gather(*tasks)
    assert set(order[:3]) == set("abc")


async def test_a_tenant_never_has_all_processes() -> None:
    async with template(BAD, max_cpu_s=60.0) as chat:
        await chat.start()
        held = [asyncio.create_task(chat.render((("user", "bad"),), tenant="bad")) for _ in range(5)]
        await asyncio.sleep(0)
        assert (await chat.render(HELLO, tenant="good")).text == HELLO[0][1]
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_conversations_that_wait_are_bounded_in_all_and_by_tenant() -> None:
    async with template(CHAT, max_pending=8) as chat:
        answers = await asyncio.gather(*(chat.render(HELLO, tenant="acme") for _ in range(5)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, ResourceExhaustedError)]
        assert len(refused) == 2, "one is rendered, two wait"
        assert all(error.retry_after_s for error in refused)
        many = await asyncio.gather(*(chat.render(HELLO, tenant=f"{place}") for place in range(12)), return_exceptions=True)
        assert [type(one) for one in many].count(ResourceExhaustedError) == 2, "two are rendered, eight wait"
        assert (await chat.render(HELLO, tenant="acme")).text, "the places are free again"


async def test_a_caller_that_leaves_gives_its_place_back() -> None:
    async with template(CHAT, max_pending=4) as chat:
        for _ in range(3):
            tasks = [asyncio.create_task(chat.render(HELLO, tenant="acme")) for _ in range(2)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert (await chat.render(HELLO, tenant="acme")).text


async def test_a_process_that_is_killed_is_replaced() -> None:
    async with template(CHAT) as chat:
        await chat.start()
        before = chat.pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*(chat.render(HELLO, tenant=tenant) for tenant in "ab"), return_exceptions=True)
        assert [type(answer) for answer in answers] == [UnavailableError] * 2
        assert (await chat.render(HELLO, tenant="c")).text
        assert set(chat.pids).isdisjoint(before)


async def test_a_process_that_stands_still_is_replaced_and_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    async with template(CHAT) as chat:
        await chat.start()
        before = chat.pids
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("dataplane.frontend.chat_template.PATIENCE_S", 0.01)
            with pytest.raises(
                UnavailableError, match="no readable answer within 30 s, though it had processor time left"
            ) as caught:
                await chat.render(HELLO, tenant="a")
        assert caught.value.retry_after_s
        assert (await chat.render(HELLO, tenant="a")).text
        assert len(set(before) & set(chat.pids)) == 1, "the other one was not asked"


async def test_a_process_that_does_not_come_up_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    async with template(CHAT) as chat:
        with monkeypatch.context() as patch:
            patch.setattr("veneer.chat.process.sys.executable", "/bin/false")
            await chat.start()
            with pytest.raises(UnavailableError, match="ended as it began"):
                await chat.render(HELLO, tenant="acme")
        assert chat.fault == ""
        assert (await chat.render(HELLO, tenant="acme")).text


async def test_close_ends_all_processes_also_one_that_renders() -> None:
    async with template(BAD, max_cpu_s=60.0) as chat:
        await chat.start()
        pids = chat.pids
        rendering = asyncio.create_task(chat.render((("user", "bad"),), tenant="acme"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        chat.close()
        with pytest.raises(UnavailableError):
            await rendering
        with pytest.raises(UnavailableError):
            await chat.render(HELLO, tenant="acme")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_no_descriptor_is_left_or_closed_twice_under_either_loop(runner: Callable[..., None]) -> None:
    async def run() -> None:
        async with template(BAD, max_cpu_s=0.1) as chat:
            await chat.start()
            for _ in range(3):
                with pytest.raises(TemplateLimitError):
                    await chat.render((("user", "bad"),), tenant="acme")
                opened = os.open("/dev/null", os.O_RDONLY)  # takes the number that was closed last
                await chat.render(HELLO, tenant="acme")
                os.close(opened)

    runner(asyncio.sleep(0))  # what the loop's library keeps for the process is open from here on
    before = num_open_files()
    runner(run())
    assert num_open_files() <= before
