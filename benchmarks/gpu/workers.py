"""Run jobs in worker processes, so that a crash, a hang or running out of memory does not lose other jobs' figures."""

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

# Figures by name; or, under one of REASONS, the reason why the row has none.
Row = dict[str, Any]
REASONS = ("refused", "error", "not run")
FAILURES = ("error", "not run")

START_SECONDS = 60  # for a process to start and import
STOP_SECONDS = 20  # for the driver to release a killed process
MOST_ERRORS = 2  # errors of a contender in a piece after which its other jobs are skipped; one hang is enough
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Job:
    """One row of a piece, computed by `module.measure(**arguments)`.

    Attributes:
        contender, case: the two parts of the row's name.
        module: name of the module with `measure`.
        arguments: keyword arguments of `measure`.
        refused: the reason why the job cannot run, if known beforehand.
        given_rows: whether `measure` also gets `rows`: the rows of the jobs that ran before, by name.
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
    """A part of the suite that can be selected by name.

    Attributes:
        name: its name on the command line.
        title: heading of its table.
        jobs: its rows.
        columns: columns of its table: header, key in the row, format.
        share: share of the suite's time.
        limit: seconds for one job.
        environment: environment variables of the workers.
        fresh: start a new process for each job, so that its peak memory is its own.
        parallel: run contenders at the same time, if nothing is timed.
        conclude: computes figures from all rows, such as ratios, by name.
    """

    name: str
    title: str
    jobs: Sequence[Job]
    columns: Sequence[tuple[str, str, str]]
    share: float
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False
    parallel: bool = False
    conclude: Callable[[dict[str, Row]], dict[str, Any]] = lambda rows: {}


def run(piece: Piece, jobs: Sequence[Job], deadline: float) -> Iterator[tuple[Job, Row]]:
    """Yield rows as they are measured; `deadline` is in terms of time.monotonic()."""
    if not piece.parallel:
        yield from _run_in_order(piece, jobs, deadline)
        return
    groups = {job.contender: [other for other in jobs if other.contender == job.contender] for job in jobs}
    with ThreadPoolExecutor(len(groups)) as pool:
        made = [pool.submit(lambda g: list(_run_in_order(piece, g, deadline)), g) for g in groups.values()]
        for rows in as_completed(made):
            yield from rows.result()


def _run_in_order(piece: Piece, jobs: Sequence[Job], deadline: float) -> Iterator[tuple[Job, Row]]:
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
            # The next process imports while this one measures. It does not touch the GPU before its first job.
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
    """A process that imports a module and then answers each job with a row."""

    def __init__(self, module: str, environment: dict[str, str]):
        self.module, self.ready = module, False
        self.log = tempfile.NamedTemporaryFile(prefix="gpu_suite_")  # noqa: SIM115
        self.connection, theirs = SPAWN.Pipe()
        arguments = (theirs, module, environment, self.log.name)
        self.process = SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, arguments: dict[str, Any], seconds: float) -> Row:
        """Return the row that `measure` returns for these arguments, or a row with its failure."""
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
            output = Path(self.log.name).read_text(errors="replace").strip()
            return {"error": f"exit status {self.process.exitcode}: {output[-2000:]}"}

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
