"""What the loop says when it starts, and what is done beside it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dataplane.engine.client import EngineClient
from dataplane.engine.intake import Arrival, Intake
from dataplane.engine.messages import Submit
from tests.dataplane.engine.serving import collect, request


@pytest.mark.parametrize("form", ["torch", "native"])
@pytest.mark.parametrize(("stepping", "steps"), [("serial", "one after the other"), ("overlapped", "while the one before runs")])
async def test_the_start_names_the_form_the_order_of_steps_and_the_memory(
    started: Any, form: str, stepping: str, steps: str
) -> None:
    client: EngineClient = await started(cpu_form=form, stepping=stepping)
    plan = client.ready.plan
    (chosen,) = [line for line in plan if line.startswith("form ")]
    assert form in chosen
    (order,) = [line for line in plan if line.startswith("steps ")]
    assert steps in order
    assert any(line.startswith("huge pages") for line in plan)
    assert any(line.startswith("base weights") for line in plan)


async def test_a_prompt_is_checked_and_hashed_by_who_brings_it_and_not_by_the_loop(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: EngineClient = await started()
    threads: list[str] = []
    prepare = Intake.prepare

    def note(self: Intake, submit: Submit) -> Arrival:
        threads.append(threading.current_thread().name)
        return prepare(self, submit)

    monkeypatch.setattr(Intake, "prepare", note)
    await asyncio.gather(*(collect(client, request(str(i), [i] * 40, cache_salt="s")) for i in range(3)))
    assert threads == [threading.current_thread().name] * 3
