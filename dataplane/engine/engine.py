"""The step loop: commands in, plan, run, commit, events out."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dataplane.engine.adapters import DeviceAdapters
from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import find_gpu
from dataplane.engine.grammar import GrammarCompiler, Grammars
from dataplane.engine.intake import Arrival, Intake
from dataplane.engine.kv_cache import PagePool
from dataplane.engine.limits import Limits, Prices
from dataplane.engine.memory import available_bytes, check_fits, huge_pages_line, plan_memory
from dataplane.engine.messages import (
    Abort,
    Command,
    Event,
    Fail,
    Failed,
    Holding,
    Pause,
    Pin,
    Query,
    Ready,
    Resume,
    Stage,
    State,
    Stop,
    Submit,
    Unpin,
    Unstage,
)
from dataplane.engine.plan import Plan, Result
from dataplane.engine.queue_times import QueueTimes
from dataplane.engine.queued import QueuedStepping
from dataplane.engine.runner import Runner
from dataplane.engine.samples import Orders, Samples, TakeSamples
from dataplane.engine.scheduler import Scheduler
from dataplane.engine.step_rows import StepRows
from dataplane.engine.stepping import OverlappedStepping, SerialStepping, Stepping
from dataplane.engine.stopwatch import Stopwatch
from dataplane.engine.unloads import Unloads
from dataplane.lora.holdings import Holding as Held
from dataplane.lora.holdings import TenantLimitError
from dataplane.model.config import read_config
from veneer.errors import VeneerError

Emit = Callable[[Sequence[Event]], None]
"""Takes the events of one turn of the loop; called from the loop's thread; must not block."""

_IDLE_S = 60.0


class Engine:
    """Everything between commands and events. `send` may be called from any thread; `run` is the loop and owns all the rest.

    Args:
        config: Settings.
        emit: Where events go.

    Raises:
        InvalidArgumentError: The model folder cannot be served.
        FailedPreconditionError: The settings do not fit into memory, or ask for a device that cannot serve.
    """

    def __init__(self, config: EngineConfig, emit: Emit) -> None:
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        find_gpu(config)
        model = read_config(Path(config.model_dir))
        memory = plan_memory(config, model)
        available = available_bytes(torch.device(config.device))
        check_fits(memory, available)
        self._emit = emit
        self._intake = Intake(
            base_digest=config.base_digest,
            page_size=config.page_size,
            vocab_size=model.vocab_size,
            max_context=memory.max_context,
        )
        self._wake = threading.Event()
        self._inbox: queue.SimpleQueue[Command | Arrival] = queue.SimpleQueue()
        self._runner = Runner(config, model, memory)
        self._stepping = self._choose_stepping(config)
        self._adapters = DeviceAdapters(config, self._runner.arena, wake=self._wake)
        self._pool = PagePool(memory.num_pages, config.page_size)
        limits = Limits(
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
            max_step_rank_rows=config.max_step_rank_rows,
            max_context=memory.max_context,
            max_waiting=config.max_waiting,
            max_waiting_per_tenant=config.max_waiting_per_tenant,
            max_step_ms=config.max_step_ms,
            max_mask_wait_s=config.grammar_timeout_s,
            prices=Prices(
                decode_token=config.decode_price,
                rank_row=config.rank_row_price,
                load_mib=config.load_mib_price,
                grammar_ms=config.grammar_ms_price,
            ),
        )
        self._scheduler = Scheduler(limits, self._pool, self._adapters)
        self._page_bytes = memory.page_bytes
        self._unloads = Unloads(self._adapters, self._scheduler, page_bytes=memory.page_bytes)
        compiler = GrammarCompiler(Path(config.model_dir), vocab_size=model.vocab_size, eos_ids=config.eos_ids)
        self._grammars = Grammars(compiler, wake=self._wake.set, max_bytes=config.grammar_bytes)
        self._projections = model.projections
        self._unit_bytes = config.arena_unit_bytes
        self._arena_bytes = self._runner.arena.num_units * config.arena_unit_bytes
        self._watch = Stopwatch()
        self._queue_times = QueueTimes()
        self._step_rows = StepRows()
        self._orders = Orders()
        self._takes_samples = not config.has_device_form
        self._stopping = False
        self._steps = self._generated = self._mixed_steps = 0
        self._max_adapters = self._max_rows = 0
        self._found: Counter[str] = Counter()
        how = "each planned while the one before runs" if config.overlaps_steps else "one after the other"
        form = f"{'form':<16}{self._runner.form}, on {config.device}"
        lines = (*memory.lines(available), huge_pages_line(), form, f"{'steps':<16}{how}")
        self.ready = Ready(lines, memory.max_context, model.vocab_size, self._runner.slower)

    def send(self, command: Command) -> None:
        """Hands a command to the loop; what of a request can be prepared beside the loop is done here."""
        self._inbox.put(self._intake.prepare(command) if isinstance(command, Submit) else command)
        self._wake.set()

    def run(self) -> None:
        """Runs until `Stop`. An exception ends every request UNAVAILABLE and is raised again: the state is in doubt then."""
        message = "the engine stops"
        try:
            self._emit((self.ready,))
            self._stepping.drive(self._loop)
        except BaseException as error:
            message = f"the engine failed: {type(error).__name__}"
            raise
        finally:
            self._emit([Failed(request_id, "UNAVAILABLE", message) for request_id in self._scheduler.request_ids])
            self._grammars.stop()
            self._adapters.stop()

    def _choose_stepping(self, config: EngineConfig) -> Stepping:
        if not config.overlaps_steps:
            return SerialStepping(self._run_step)
        return QueuedStepping(self._runner) if config.has_device_form else OverlappedStepping(self._run_step, wake=self._wake.set)

    def _run_step(self, plan: Plan) -> list[Result]:
        return self._runner.run(plan)

    def _loop(self) -> None:
        while not self._stopping:
            self._turn()

    def _turn(self) -> None:
        """One turn: commands, adapters, deadlines, a plan, and what came of a step; or a wait for the first of those."""
        self._watch.start()
        self._wake.clear()
        events: list[Event] = []
        while not self._inbox.empty():
            self._handle(self._inbox.get(), events)
        if costs := self._grammars.take_costs():
            self._scheduler.charge_grammars(costs)
        for note in self._adapters.settle():
            if isinstance(note, Fail):
                events += self._scheduler.fail_waiting(note.version, status=note.status, message=note.message)
            else:
                events.append(note)
        events += self._unloads.settle()
        events += self._scheduler.expire(time.monotonic())
        self._watch.lap("receive")
        plan = self._scheduler.schedule()
        has_step = plan is not None and plan.num_tokens > 0
        events += self._scheduler.refuse()
        self._queue_times.observe(self._scheduler.take_admitted(), time.monotonic())
        self._watch.lap("schedule")
        if plan is not None and has_step:
            self._count(plan)
            self._hand_over_orders(plan)
        done = self._stepping.turn(plan if has_step else None)
        self._watch.lap("run")
        if done is not None:
            outcome = self._scheduler.commit(done.plan, done.results, seconds=done.seconds)
            if outcome.tokens.ids:
                self._generated += len(outcome.tokens.ids)
                events.append(outcome.tokens)
            events += outcome.failed
            events += outcome.not_finite
            self._watch.lap("commit")
        while not self._runner.samples.empty():
            events.append(self._runner.samples.get())
        if events:
            self._emit(events)
            self._watch.lap("emit")
        if not has_step and done is None:
            deadline = self._scheduler.next_deadline
            timeout = _IDLE_S if deadline is None else min(_IDLE_S, max(0.0, deadline - time.monotonic()))
            if not self._stopping:
                self._wake.wait(timeout)

    def _handle(self, command: Command | Arrival, events: list[Event]) -> None:
        match command:
            case Arrival():
                self._submit(command, events)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case Pause(request_id):
                self._scheduler.pause(request_id, paused=True)
            case Resume(request_id):
                self._scheduler.pause(request_id, paused=False)
            case Stage() | Unstage() | Pin() | Unpin():
                self._handle_version(command, events)
            case Fail(version, status, message):
                events += self._scheduler.fail_waiting(version, status=status, message=message)
            case Query(token):
                events.append(self._state(token))
            case TakeSamples(token):
                if not self._takes_samples:
                    events.append(Samples(token))
                elif not self._orders.add(command):
                    events.append(Samples(token, refused=True))
            case Stop():
                self._stopping = True

    def _handle_version(self, command: Stage | Unstage | Pin | Unpin, events: list[Event]) -> None:
        match command:
            case Stage(version, path):
                if (unloaded := self._unloads.cancel(version)) is not None:
                    events.append(unloaded)
                self._scheduler.prefix.unbar(version)
                self._adapters.stage(version, path)
            case Unstage(version, drop_device):
                if drop_device:
                    self._unloads.ask(version)
                else:
                    self._adapters.unstage(version, drop_device=False)
            case Pin(version, owner):
                self._adapters.pin(version, owner)
            case Unpin(version):
                self._adapters.unpin(version)

    def _submit(self, arrival: Arrival, events: list[Event]) -> None:
        submit = arrival.submit
        try:
            if arrival.fault is not None:
                raise arrival.fault
            grammar = submit.sampling.grammar
            mask = self._grammars.mask(submit.tenant, grammar) if grammar else None
            self._scheduler.add(submit, time.monotonic(), chain=arrival.chain, keys=arrival.keys, mask=mask)
        except VeneerError as error:
            events.append(_failed(submit, error))
            return
        if submit.version is not None:
            place = self._adapters.place_of(submit.version)
            on_device = self._adapters.want(submit.version, submit.tenant, weight=submit.weight, max_bytes=submit.max_arena_bytes)
            self._found["device" if on_device else place] += 1

    def _hand_over_orders(self, plan: Plan) -> None:
        """Lets the step take the samples that are asked of versions that it serves: their slots stay while it runs."""
        if versions := self._orders.versions:
            served = _slots(plan)
            found = {version: self._adapters.residency.slot_of(version) for version in versions}
            for due in self._orders.due({version: slot for version, slot in found.items() if slot in served and slot >= 0}):
                self._runner.orders.put(due)

    def _count(self, plan: Plan) -> None:
        slots = _slots(plan)
        num_adapters = len(slots - {-1})
        self._step_rows.observe(slots, self._runner.arena.descriptors.largest_rank)
        self._steps += 1
        self._max_adapters = max(self._max_adapters, num_adapters)
        self._max_rows = max(self._max_rows, plan.num_tokens)
        self._mixed_steps += num_adapters >= 2 and -1 in slots

    def _state(self, token: int) -> State:
        residency, scheduler = self._adapters.residency, self._scheduler
        holdings = residency.holdings()
        return State(
            token=token,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_pages_used=scheduler.num_pages_used,
            kv_pages_total=self._pool.num_pages,
            kv_pages_kept=self._pool.num_kept,
            prefix_queries=scheduler.prefix.queries,
            prefix_hits=scheduler.prefix.hits,
            waiting_by_reason=scheduler.waiting_by_reason(),
            queue_counts=self._queue_times.counts,
            queue_seconds=self._queue_times.total_s,
            rank_row_counts=self._step_rows.counts,
            rank_rows=self._step_rows.total,
            kv_page_bytes=self._page_bytes,
            host_bytes=self._adapters.host_bytes,
            arena_bytes_used=residency.units_used * self._unit_bytes,
            arena_bytes_total=self._arena_bytes,
            leases=sum(holding.leases for holding in holdings),
            steps=self._steps,
            max_adapters_in_step=self._max_adapters,
            max_rows_in_step=self._max_rows,
            mixed_steps=self._mixed_steps,
            generated_tokens=self._generated,
            device_hits=self._found["device"],
            host_hits=self._found["host"],
            disk_hits=self._found["disk"],
            store_loads=self._found["store"],
            evictions=residency.counters.evictions,
            holdings=tuple(map(self._holding, holdings)),
            seconds=(*self._watch.seconds.items(), *self._runner.watch.seconds.items()),
        )

    def _holding(self, held: Held) -> Holding:
        holding = Holding(held.version, held.place, held.rank, held.size_bytes, held.leases, held.epoch, held.uses)
        if (loss := held.loss) is None or not loss.error:
            return holding
        return replace(holding, loss=loss.error, loss_at=f"layers.{loss.layer}.{self._projections[loss.slice].path}")


def _slots(plan: Plan) -> set[int]:
    return {*plan.decodes.slots.tolist(), *(rows.slot for rows in plan.rows)}


def _failed(submit: Submit, error: VeneerError) -> Failed:
    return Failed(submit.request_id, error.status, error.message, error.retry_after_s, isinstance(error, TenantLimitError))
