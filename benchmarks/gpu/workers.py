"""Jobs in processes of their own: one that crashes, hangs or takes all memory does not lose the figures of others."""

import importlib
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Figures by name; or the reason why there are none under one of REASONS.
Row = dict[str, Any]
REASONS = ("refused", "error", "not run")
FAILURES = ("error", "not run")

START_SECONDS = 60  # for a process to start and import
STOP_SECONDS = 20  # for the driver to let go of a killed one
MOST_ERRORS = 2  # of a contender in a piece, after which the rest of its jobs are left out; one hang is enough
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """One row of a piece. `module.measure(**arguments)` gives it, unless it is known beforehand to be `refused`.

    given_rows: it is also given `rows`, by their names those of the jobs that ran before it.
    """

    contender: str
    case: str
    module: str
    arguments: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    given_rows: bool = False

    @property
    def name(self) -> str:
        return f"{self.contender}/{self.case}"


@dataclass(frozen=True)
class Piece:
    """A part of the suite that can be chosen by name."""

    name: str
    title: str
    jobs: Sequence[Job]
    columns: Sequence[tuple[str, str, str]]  # of the table: header, key of the row, format
    share: float  # of the suite's time
    limit: float  # seconds of one job
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False  # a process for each job: its peak memory is its own
    parallel: bool = False  # contenders at the same time: nothing is timed
    conclude: Callable[[dict[str, Row]], dict[str, Any]] = lambda rows: {}  # from comparing rows, by a name for each


def run(piece: Piece, jobs: Sequence[Job], deadline: float) -> Iterator[tuple[Job, Row]]:
    """Rows as they are made; `deadline` is of time.monotonic()."""
    if not piece.parallel:
        yield from _one_after_the_other(piece, jobs, deadline)
        return
    groups = {job.contender: [other for other in jobs if other.contender == job.contender] for job in jobs}
    with ThreadPoolExecutor(len(groups)) as pool:
        made = [pool.submit(lambda g: list(_one_after_the_other(piece, g, deadline)), g) for g in groups.values()]
        for rows in as_completed(made):
            yield from rows.result()


def _one_after_the_other(piece: Piece, jobs: Sequence[Job], deadline: float) -> Iterator[tuple[Job, Row]]:
    errors = Counter[str]()
    worker, rows = None, {}
    for place, job in enumerate(jobs):
        left = deadline - time.monotonic()
        if job.refused:
            yield job, {"refused": job.refused}
        elif left <= 0:
            yield job, {"not run": "the time of this piece was spent"}
        elif errors[job.contender] >= MOST_ERRORS:
            yield job, {"not run": f"{job.contender} hung or failed {MOST_ERRORS} times before"}
        else:
            if worker and worker.module != job.module:
                worker.stop()
                worker = None
            worker = worker or _Worker(job.module, piece.environment)
            # The next process imports while this one measures. It touches no GPU before it is asked.
            coming = next((other for other in jobs[place + 1 :] if not other.refused), None)
            following = _Worker(coming.module, piece.environment) if piece.fresh and coming else None
            arguments = job.arguments | ({"rows": dict(rows)} if job.given_rows else {})
            row = rows[job.name] = worker.ask(arguments, min(left, piece.limit))
            if "error" in row or piece.fresh:
                worker.stop()
                worker = following
            errors[job.contender] += MOST_ERRORS if "hung" in row else "error" in row
            yield job, row
    if worker:
        worker.stop()


class _Worker:
    """A process that imports a module and then answers with a row for each job it is given."""

    def __init__(self, module: str, environment: dict[str, str]):
        self.module, self.ready = module, False
        self.log = tempfile.NamedTemporaryFile(prefix="gpu_suite_")  # noqa: SIM115
        self.connection, theirs = SPAWN.Pipe()
        arguments = (theirs, module, environment, self.log.name)
        self.process = SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, arguments: dict[str, Any], seconds: float) -> Row:
        """The row that `measure` gives for these, or how it failed."""
        try:
            if not self.ready:
                self._receive(START_SECONDS)
                self.ready = True
            self.connection.send(arguments)
            return self._receive(seconds)
        except TimeoutError as error:
            return {"error": str(error), "hung": True}
        except (EOFError, OSError):
            self.process.join()
            said = Path(self.log.name).read_text(errors="replace").strip()
            return {"error": f"exit status {self.process.exitcode}: {said[-2000:]}"}

    def _receive(self, seconds: float) -> Any:
        if not self.connection.poll(seconds):
            raise TimeoutError(f"no answer in {seconds:.0f} s")
        return self.connection.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join(STOP_SECONDS)
        self.log.close()


def _serve(connection: Any, module: str, environment: dict[str, str], log: str) -> None:
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    measure = importlib.import_module(module).measure
    connection.send("ready")
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(measure(**arguments))
