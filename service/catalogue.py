"""The models that are served: loaded, warmed, replaced and drained together. Knows no HTTP."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from service import bundle, engine, sessions
from service.bundle import Bundle
from service.crew import in_own_thread
from service.engine import CapsNet
from service.errors import Busy, StartError, UnknownModel
from service.manifest import MANIFEST, BundleError
from service.metrics import Metrics
from service.process import cpus, interpreter
from service.runtime import CPU
from service.served import Served
from service.sessions import Device
from service.settings import Settings

State = Literal["ready", "warming", "draining", "failing"]
Change = Literal["added", "replaced", "removed", "unchanged"]

logger = logging.getLogger(__name__)

PROBE_EVERY = 1.0  # seconds
LONGEST_RELOAD = 300.0  # seconds; if one takes longer the runtime hangs, and other reloads are waiting
SKIPPED_PREFIXES = (".", "_", "lost+found")  # prefixes of folders that are not bundles; the last is in the root of a volume


def load(settings: Settings, known: Mapping[str, CapsNet] | None = None) -> dict[str, CapsNet]:
    """Loads every bundle of the models folder, by name, checked and replayed; reuses those of `known` that are unchanged."""
    open_bundle = opener(settings)
    nets: dict[str, CapsNet] = {}
    for folder in folders(settings):
        source = bundle.read(folder)
        before = (known or {}).get(source.manifest.name)
        add(nets, before if before is not None and before.manifest == source.manifest else open_bundle(source), folder)
    return nets


def add(nets: dict[str, CapsNet], net: CapsNet, folder: Path) -> CapsNet:
    if net.manifest.name in nets:
        raise BundleError(
            f"{folder}: expected a unique name, found {net.manifest.name} again; change `name` in its manifest.json, or "
            "start the folder's name with _ to have it skipped"
        )
    nets[net.manifest.name] = net
    return net


def folders(settings: Settings) -> list[Path]:
    try:
        with os.scandir(settings.models) as entries:
            names = [entry.name for entry in entries if not (entry.name.startswith(SKIPPED_PREFIXES) or _is_file(entry))]
        found = "none in it"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise BundleError(f"{settings.models}: {error.strerror}; raise their limit (`ulimit -n`)") from error
        names, found = [], str(error.strerror)
    if os.path.exists(settings.models / MANIFEST):  # Path.exists would raise if the folder may not be searched
        raise BundleError(f"{settings.models}: expected a folder of bundles, found a bundle; name the folder that holds it")
    if not names:
        raise BundleError(f"{settings.models}: expected a folder of bundles, found {found}; name another with CAPSERVE_MODELS")
    return [settings.models / name for name in sorted(names)]


def _is_file(entry: os.DirEntry[str]) -> bool:
    """True of a README beside the bundles, say. A broken link counts as a bundle: reading it then says what is wrong."""
    try:
        return entry.is_file()
    except OSError:
        return False


def default(settings: Settings, nets: Mapping[str, CapsNet]) -> str:
    """The model for requests that name none."""
    name = settings.model or ("compact" if "compact" in nets else min(nets))
    if name not in nets:
        raise StartError(f"CAPSERVE_MODEL={name}, but {settings.models} has only {', '.join(sorted(nets))}")
    return name


def opener(settings: Settings) -> Callable[[Bundle], CapsNet]:
    """Returns a function that loads bundles, all on the same device, which the first of them tries out."""
    threads = settings.threads or max(1, cpus.available() // settings.workers)
    device: Device | None = None

    def open_bundle(source: Bundle) -> CapsNet:
        nonlocal device
        if device is None:
            probe = source.encoder("fp32")
            device = sessions.device(settings.device, threads, settings.cuda_memory, settings.cuda_graphs, probe)
        return engine.load(source, settings.variant, device)

    return open_bundle


def other_encoders(settings: Settings, source: Bundle, net: CapsNet) -> list[CapsNet]:
    """Loads a bundle's other encoders, which this processor would not choose but others may."""
    if settings.variant != "auto" or net.device.provider != CPU:
        return []
    return [engine.load(source, variant, net.device) for variant in source.manifest.variants if variant != net.variant]


class Catalogue:
    def __init__(self, nets: Mapping[str, CapsNet], settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._served = {name: Served(net, settings, metrics) for name, net in nets.items()}
        self._outgoing: dict[Served, asyncio.Task[None]] = {}  # replaced or removed, still used by requests that found them
        self._reloading = asyncio.Lock()
        self.default = default(settings, nets)
        self.warm = False
        self._unsupervised = False  # supervision of the models has failed
        self._drain_deadline: float | None = None  # time.monotonic() by which draining must be done
        for net in nets.values():
            metrics.describe(net)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def get(self, name: str | None) -> Served:
        try:
            return self._served[self.default if name is None else name]
        except KeyError:
            names = ", ".join(sorted(self._served))
            raise UnknownModel(f"there is no model called {str(name)[:40]!r}; there are {names}") from None

    def admit(self) -> None:
        if self._unsupervised:
            raise Busy("the models are no longer supervised; this server must be restarted, ask another", "failed")
        if not self.warm:
            raise Busy("the models are still warming up; ask again in a second", "warming")

    @property
    def draining(self) -> bool:
        return self._drain_deadline is not None

    def start_draining(self) -> None:
        """Starts draining: not ready from now on, and at an end after `linger` and `drain` seconds at most."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self._settings.linger + self._settings.drain

    def end_draining(self) -> None:
        """Ends draining now: what is not answered yet will not be."""
        self._drain_deadline = time.monotonic()

    @property
    def state(self) -> State:
        if self.draining:
            return "draining"
        if self._unsupervised:
            return "failing"
        if not self.warm:
            return "warming"
        return "ready" if all(served.sound for served in self) else "failing"

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def serves(self, served: Served) -> bool:
        """Whether this one model would answer, whatever the state of the others."""
        return served.sound and self.warm and not self.draining

    @property
    def alive(self) -> bool:
        """False if a restart would help: a model hangs or fails again and again, or supervision of the models has failed."""
        return not (self._unsupervised or any(served.hopeless for served in self))

    async def reload(self) -> dict[str, Change]:
        """Serves what the models folder holds now, without losing a request.

        What changed is verified, replayed and warmed up beside the old, then takes its place; on any fault all stays as it was.
        """
        try:
            async with self._reloading:
                changes = await self._reload_in_time()
        except Exception as error:  # counted whatever it is, and raised again
            self._metrics.reloaded.set(0)
            if isinstance(error, (BundleError, StartError)):
                why = str(error).encode(errors="replace").decode()  # a folder's name may not be UTF-8
                logger.error("not reloaded, the previous models still serve: %s", why)
            raise
        self._metrics.reloaded.set(1)
        logger.info("reloaded: %s", ", ".join(f"{name} {change}" for name, change in changes.items()))
        return changes

    async def _reload_in_time(self) -> dict[str, Change]:
        try:
            async with asyncio.timeout(LONGEST_RELOAD) as limit:
                return await self._reload()
        except TimeoutError:
            if not limit.expired():
                raise
            raise BundleError(
                f"{self._settings.models}: expected models that are loaded and warm within {LONGEST_RELOAD:g} s, found one that "
                "hangs; its thread still does, so restart the process if that happens again"
            ) from None

    async def _reload(self) -> dict[str, Change]:
        before = self._served
        known = {name: served.net for name, served in before.items()}
        nets = await in_own_thread(partial(load, self._settings, known))
        default_name = default(self._settings, nets)
        fresh = {name: Served(net, self._settings, self._metrics) for name, net in nets.items() if known.get(name) is not net}
        await self._prepare_all(fresh)
        if default_name != self.default:
            logger.warning("the default model is now %s, no longer %s", default_name, self.default)
        self._served, self.default = {name: fresh.get(name) or before[name] for name in nets}, default_name
        changes = {name: _change(name, before, self._served) for name in sorted({*before, *nets})}
        for name, served in before.items():
            if changes[name] != "unchanged":
                self._dismiss(served)
        for served in fresh.values():
            self._metrics.describe(served.net)
            served.measure()
        interpreter.collect_and_freeze()
        return changes

    async def _prepare_all(self, fresh: Mapping[str, Served]) -> None:
        try:
            for name, served in fresh.items():
                if error := await self._prepare(served):  # not counted against the served model of that name
                    logger.error("%s does not run: %s", name, error)
                    raise BundleError(f"{name}: expected a model that runs, found a failure of the runtime; see the log")
        except BaseException:  # or cancelled, as when the client has left: their threads would keep them for ever
            for each in fresh.values():
                await each.drain(0)
            raise

    def _dismiss(self, served: Served) -> None:
        """Lets go of a model that left the catalogue, once the requests that found it there have been answered."""

        async def leave() -> None:
            await asyncio.sleep(self._settings.deadline)
            while not await served.drain(self._settings.drain):  # run() goes on supervising it
                logger.warning("%s was replaced or removed, and still has requests to answer", served.manifest.name)
            del self._outgoing[served]

        self._metrics.forget(served.net)
        self._outgoing[served] = asyncio.create_task(leave())

    async def warm_up(self) -> None:
        for served in self:
            if error := await self._prepare(served):  # then not ready, and probed from now on
                served.record_failure(error)
        interpreter.collect_and_freeze()
        self.warm = True
        logger.info("ready: %s", ", ".join(f"{served.manifest.name} ({served.net.variant})" for served in self))

    async def run(self, measure: Callable[[], None]) -> None:
        """Warms up the models, if that is not done, then supervises them until it is cancelled.

        `measure` is called every second, for scrapes that another worker answers.
        """
        try:
            if not self.warm:
                await self.warm_up()
            await self._supervise(measure)
        except Exception:  # no thread can be started, say; nobody awaits this task before the end
            self._unsupervised = True
            logger.exception("supervising the models failed; /healthz asks for a restart")

    async def _supervise(self, measure: Callable[[], None]) -> None:
        async def check_all() -> None:
            measure()
            for served in (*self, *self._outgoing):
                served.drop_overdue()

        async def probe_failing() -> None:
            await asyncio.gather(*(served.probe() for served in self if served.failures_in_a_row))

        async with asyncio.TaskGroup() as group:  # two tasks, since a probe may take as long as the deadline
            group.create_task(_repeat(check_all))
            group.create_task(_repeat(probe_failing))

    async def _prepare(self, served: Served) -> Exception | None:
        served.start()
        try:
            await in_own_thread(partial(served.net.warm_up, self._settings.max_batch))
        except Exception as error:  # whatever the runtime raises
            return error
        return None

    def measure(self) -> None:
        self._metrics.ready.set(self.ready)
        for served in self:
            served.measure()

    async def drain(self) -> None:
        """Answers what was accepted, in the time that is left."""
        self.start_draining()
        assert self._drain_deadline is not None
        left = max(0.0, self._drain_deadline - time.monotonic())
        await asyncio.gather(*(served.drain(left) for served in (*self, *self._outgoing)))


async def _repeat(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:  # a full disk under the metrics, say: the models need supervision all the same
            logger.exception("supervising the models failed; trying again in %g s", PROBE_EVERY)
        await asyncio.sleep(PROBE_EVERY)


def _change(name: str, before: Mapping[str, Served], after: Mapping[str, Served]) -> Change:
    if name not in before:
        return "added"
    if name not in after:
        return "removed"
    return "unchanged" if before[name] is after[name] else "replaced"
