"""Models that come and go: which are loaded, who waits, and who is refused, without a clock."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from typing import Any

import pytest

from kvasir.server.errors import UnavailableError
from kvasir.server.requests.loading.loader import ModelLoader, Need
from kvasir.server.setting_values import seconds_of

TIMEOUT = 60.0


class Machine:
    """Memory that fake models fill; notes what a real one would not survive."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self.most_used = 0
        self.running: dict[str, int] = {}
        self.events: list[str] = []

    def take(self, n: int) -> None:
        self.used += n
        self.most_used = max(self.most_used, self.used)


class FakeModel:
    """A model of `kept` bytes and `peak` while it is loaded, which takes turns of the loop."""

    def __init__(self, name: str, machine: Machine, kept: int = 1, peak: int | None = None) -> None:
        self.name, self.machine = name, machine
        self.sizes = Need(kept if peak is None else peak, kept)
        self.gate: asyncio.Event | None = None  # of a load that waits for it
        self.error: Exception | None = None
        self.is_loaded = False
        self.version: object = 0
        self.newest = 0
        self.retired: list[object] = []

    def has_changed(self) -> bool:
        return self.newest != self.version

    async def retire(self, version: object) -> None:
        assert version != self.version
        self.retired.append(version)
        self.machine.used -= self.sizes.kept

    def need(self) -> Need:
        return self.sizes

    async def load(self) -> None:
        assert not self.is_loaded or self.has_changed()
        self.machine.events.append(f"load {self.name}")
        self.machine.take(self.sizes.peak)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
        except BaseException:
            self.machine.used -= self.sizes.peak
            raise
        self.machine.used -= self.sizes.peak - self.sizes.kept
        self.is_loaded, self.version = True, self.newest

    async def unload(self) -> None:
        assert self.is_loaded
        assert not self.machine.running.get(self.name), "unloaded while a sequence runs"
        self.machine.events.append(f"unload {self.name}")
        self.is_loaded = False
        await asyncio.sleep(0)
        self.machine.used -= self.sizes.kept


def make(
    sizes: dict[str, int], memory: int, keep_alive: float = math.inf, max_waiting: int = 1000
) -> tuple[ModelLoader, dict[str, FakeModel], Machine]:
    machine = Machine(memory)
    models = {name: FakeModel(name, machine, size) for name, size in sizes.items()}
    loader = ModelLoader(
        models.values(),
        budget=memory,
        free=lambda: machine.size - machine.used,
        keep_alive=keep_alive,
        max_waiting=max_waiting,
    )
    return loader, models, machine


async def use(loader: ModelLoader, name: str, keep_alive: float | None = None) -> None:
    async with asyncio.timeout(TIMEOUT), loader.hold(name, keep_alive):
        pass


async def settle() -> None:
    """Let tasks that wait for nothing but their turn end."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(10))
async def test_random_requests_end_once_and_never_outgrow_memory(seed: int) -> None:
    """Loads that fail, clients that leave and unloads by name are among the requests."""
    draw = random.Random(seed)
    sizes = {name: draw.randint(2, 5) for name in "abc"}
    memory = draw.randint(max(sizes.values()) + 1, sum(sizes.values()))
    loader, models, machine = make(sizes, memory, draw.choice([0.0, math.inf]))
    for name, size in sizes.items():
        models[name].sizes = Need(size + draw.randint(0, 1), size)
    ends = list[str]()

    async def request(number: int) -> None:
        name = draw.choice("abc")
        for _ in range(draw.randint(0, 60)):
            await asyncio.sleep(0)
        if draw.random() < 0.1:
            models[name].error = draw.choice([None, RuntimeError("damaged")])
        if draw.random() < 0.1:
            await loader.unload(name)
        try:
            async with loader.hold(name, draw.choice([None, 0.0, math.inf])):
                assert models[name].is_loaded
                machine.running[name] = machine.running.get(name, 0) + 1
                try:
                    for _ in range(draw.randint(0, 9)):
                        await asyncio.sleep(0)
                finally:
                    machine.running[name] -= 1
                assert models[name].is_loaded
        except UnavailableError:
            ends.append(f"{number} refused")
        except asyncio.CancelledError:
            ends.append(f"{number} left")
            raise
        else:
            ends.append(f"{number} answered")

    tasks = [asyncio.create_task(request(number)) for number in range(60)]
    for _ in range(100):
        await asyncio.sleep(0)
        if draw.random() < 0.2:
            draw.choice(tasks).cancel()
    async with asyncio.timeout(TIMEOUT):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert len(ends) == len({end.split()[0] for end in ends})
    assert {end.split()[0] for end in ends} | {
        str(number) for number, task in enumerate(tasks) if task.cancelled()
    } == {*map(str, range(60))}, "a request has no end"
    failed = [task for task in tasks if not task.cancelled() and task.exception()]
    assert not failed, failed[0].exception()
    assert machine.most_used <= memory
    await settle()
    for name, model in models.items():
        model.error = None
        await loader.load(name)
        assert model.is_loaded


async def test_the_least_recently_used_goes_first() -> None:
    loader, _, machine = make({"a": 1, "b": 1, "c": 1}, 2)
    for name in "abacb":
        await use(loader, name)
    assert machine.events == ["load a", "load b", "unload b", "load c", "unload a", "load b"]
    async with loader.hold("c"):
        await use(loader, "b")
    await use(loader, "a")
    assert machine.events[6:] == ["unload b", "load a"], "a use lasts until its end"


async def test_the_peak_of_a_load_counts() -> None:
    loader, models, machine = make({"a": 2, "b": 1}, 4)
    models["b"].sizes = Need(peak=3, kept=1)
    await use(loader, "a")
    await use(loader, "b")
    assert machine.events == ["load a", "unload a", "load b"]
    await use(loader, "a")
    assert machine.events[3:] == ["load a"]


async def test_a_running_one_is_waited_for_while_its_new_requests_take_their_turn() -> None:
    loader, _, machine = make({"a": 1, "b": 1}, 1)
    async with loader.hold("a"):
        other = asyncio.create_task(use(loader, "b"))
        await settle()
        again = asyncio.create_task(use(loader, "a"))
        await settle()
        assert (machine.events, loader.n_waiting) == (["load a"], 2)
    await asyncio.gather(other, again)
    assert machine.events == ["load a", "unload a", "load b", "unload b", "load a"]


async def test_a_request_that_gives_up_leaves_the_running_model_open() -> None:
    loader, _, machine = make({"a": 1, "b": 1}, 1)
    async with loader.hold("a"):
        other = asyncio.create_task(use(loader, "b"))
        await settle()
        other.cancel()
        await settle()
        await use(loader, "a")
    assert machine.events == ["load a"]


async def test_a_load_ends_once_though_its_request_has_left() -> None:
    loader, models, machine = make({"a": 1}, 1)
    gate = models["a"].gate = asyncio.Event()
    first = asyncio.create_task(use(loader, "a"))
    await settle()
    first.cancel()
    second = asyncio.create_task(use(loader, "a"))
    await settle()
    assert (loader.state("a"), second.done()) == ("loading", False)
    gate.set()
    await second
    assert (loader.state("a"), machine.events) == ("ready", ["load a"])


async def test_the_queue_is_bounded() -> None:
    loader, models, _ = make({"a": 1}, 1, max_waiting=1)
    gate = models["a"].gate = asyncio.Event()
    first = asyncio.create_task(use(loader, "a"))
    await settle()
    with pytest.raises(UnavailableError) as refused:
        await use(loader, "a")
    assert int(refused.value.headers["retry-after"]) > 0
    gate.set()
    await first


async def test_what_never_fits_is_refused_and_unloads_nothing() -> None:
    loader, _, machine = make({"a": 1, "huge": 9}, 2)
    await use(loader, "a")
    with pytest.raises(UnavailableError, match="9 bytes, and 2") as refused:
        await use(loader, "huge")
    assert int(refused.value.headers["retry-after"]) > 0
    machine.size = 0  # others have taken the memory
    with pytest.raises(UnavailableError):
        await use(loader, "huge")
    await use(loader, "a")
    assert machine.events == ["load a"]


async def test_what_is_in_memory_beside_models_makes_room_first() -> None:
    """An explainer, with which the model that stays for now seems to leave the other no room."""
    loader, _, machine = make({"a": 6, "b": 12, "huge": 17}, 16)
    extra = 6

    async def drop() -> None:
        machine.used -= extra
        machine.events.append("drop")

    loader.on_shortage = drop
    await use(loader, "a")
    machine.take(extra)
    with pytest.raises(UnavailableError):
        await use(loader, "huge")  # no matter what leaves
    await use(loader, "b")
    assert machine.events == ["load a", "drop", "unload a", "load b"]


async def test_a_failed_load_answers_all_with_its_reason_and_is_tried_again_by_name_only() -> None:
    loader, models, machine = make({"a": 1}, 1)
    models["a"].error = RuntimeError("the graph\nis damaged")
    errors = await asyncio.gather(*(use(loader, "a") for _ in range(5)), return_exceptions=True)
    assert {type(error) for error in errors} == {UnavailableError}
    assert all("the graph is damaged" in str(error) for error in errors)
    assert (loader.state("a"), machine.events) == ("failed", ["load a"])
    with suppress(UnavailableError):
        await loader.load("a")
    models["a"].error = None
    await loader.load("a")
    assert (loader.state("a"), machine.events) == ("ready", ["load a"] * 3)


async def test_a_failure_is_forgotten_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, models, _ = make({"a": 1}, 1)
    models["a"].error = RuntimeError("no memory")
    calls = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *a: calls.append(a))
    with pytest.raises(UnavailableError):
        async with loader.hold("a"):
            pass
    models["a"].error = None
    [(_, forget, *arguments)] = calls
    forget(*arguments)
    async with loader.hold("a"):
        assert loader.state("a") == "ready"


async def test_keep_alive_is_the_last_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, _, machine = make({"a": 1}, 1, keep_alive=300.0)
    loop, timers = asyncio.get_running_loop(), list[tuple[float, Any]]()

    def call_later(seconds: float, *call: Any) -> asyncio.TimerHandle:
        timers.append((seconds, call))
        return loop.call_at(math.inf, *call)

    monkeypatch.setattr(loop, "call_later", call_later)
    for keep_alive in (None, 7.0, math.inf):
        async with loader.hold("a", keep_alive):
            assert loader.expires_at("a") is None, "not while it runs"
    assert [seconds for seconds, _ in timers] == [300.0, 300.0, 7.0], "the first is of the load"
    _, (expire, place) = timers[-1]
    async with loader.hold("a", 0.0):
        expire(place)  # as it was about to, when the request came
        await settle()
        assert loader.state("a") == "ready"
    seconds, (expire, place) = timers[-1]
    assert seconds == 0
    expire(place)
    await settle()
    assert (loader.state("a"), machine.events) == ("unloaded", ["load a", "unload a"])
    async with loader.hold("a", 7.0):
        pass
    expire(place)
    async with loader.hold("a", math.inf):  # before what has expired has its turn
        pass
    await settle()
    assert loader.state("a") == "ready"


async def test_unload_by_name_waits_for_what_runs() -> None:
    loader, _, machine = make({"a": 1}, 1)
    async with loader.hold("a"):
        await loader.unload("a")
        assert loader.state("a") == "ready"
    await settle()
    await loader.unload("a")
    assert (loader.state("a"), machine.events) == ("unloaded", ["load a", "unload a"])


async def test_a_shutdown_ends_who_waits() -> None:
    loader, models, _ = make({"a": 1, "b": 1}, 2)
    gate = models["a"].gate = asyncio.Event()
    waiting = [asyncio.create_task(use(loader, name)) for name in "ab"]
    await settle()
    loader.close()
    gate.set()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [UnavailableError, UnavailableError]
    with pytest.raises(UnavailableError, match="shutting down"):
        await use(loader, "b")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0), ("0", 0.0), (5, 5.0), ("90", 90.0), ("5m", 300.0), ("1h30m", 5400.0),
        ("1.5s", 1.5), ("500ms", 0.5), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf),
        (10**400, math.inf), (1e300, math.inf), ("9" * 60, math.inf),
    ],
)  # fmt: skip
def test_durations_are_ollamas(given: object, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 m", "5d", "1h-2m", "soon", "1m" * 10**5, True, None])
def test_others_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        seconds_of(given)


async def test_a_new_version_takes_over_and_the_old_one_ends_its_requests() -> None:
    loader, models, _ = make({"a": 1}, 10)
    model = models["a"]
    async with loader.hold("a"):
        model.newest = 1
        async with loader.hold("a"):
            assert (model.version, model.retired) == (1, [])
    await settled(loader)
    assert model.retired == [0]
    async with loader.hold("a"):
        model.newest, model.error = 2, ValueError("half a copy")
        async with loader.hold("a"):
            assert model.version == 1, "one that cannot be loaded leaves the old one"
        model.error = None
    async with loader.hold("a"):
        assert model.version is model.newest
    await settled(loader)
    assert model.retired == [0, 1]


async def settled(loader: ModelLoader) -> None:
    await asyncio.gather(*loader._tasks)
