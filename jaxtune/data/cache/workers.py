"""Worker processes that compute a function of tasks.

Workers run this module (`python -m`), so that they import neither jax nor the program that starts them. They end with
the program. Workers that `multiprocessing` spawns would import the program's main module.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxtune.errors import UserError

_AHEAD = 2  # tasks in flight for each process: waiting, or finished before their turn


def ordered_map(function: Callable[[Any], Any], tasks: Iterable[Any], processes: int) -> Iterator[Any]:
    """Yield function(task) for each task, in order, computed by worker processes.

    The function, the tasks and the results are pickled. A UserError of the function or of `tasks` is raised after the
    results before it have been yielded.
    """
    with contextlib.ExitStack() as stack:
        threads = ThreadPoolExecutor(processes)
        stack.callback(threads.shutdown)
        workers = [stack.enter_context(_start_worker()) for _ in range(processes)]
        # Callbacks run last to first: cancel waiting tasks, then kill the workers, then join the threads.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        pickled = pickle.dumps(function)
        for process in workers:  # all workers import their modules at the same time
            assert process.stdin is not None
            process.stdin.write(pickled)
            idle.put(process)

        def compute(task: Any) -> Any:
            process = idle.get()
            try:
                return _compute(process, task)
            finally:
                idle.put(process)

        # Results are yielded in the order of the tasks; `_AHEAD` bounds those that wait in memory.
        waiting: deque[Future] = deque()
        failed = None
        tasks = iter(tasks)
        while failed is None:
            try:
                waiting.append(threads.submit(compute, next(tasks)))
            except StopIteration:
                break
            except UserError as error:
                failed = error
            if len(waiting) > _AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        if failed is not None:
            raise failed


@contextlib.contextmanager
def _start_worker() -> Iterator[subprocess.Popen]:
    """Start a worker process; kill it at the end."""
    # Each worker uses one core; the tokenizer would otherwise start threads for all cores.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
    command, pipe = [sys.executable, "-m", "jaxtune.data.cache.workers"], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout):
            assert end is not None
            with contextlib.suppress(BrokenPipeError):
                end.close()


def _compute(process: subprocess.Popen, task: Any) -> Any:
    """Send a task to a worker, and return its result. Raises UserError if the function does, or if the worker ends."""
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        # A worker that the kernel's out-of-memory killer ended has code -9, for SIGKILL.
        code = process.wait()
        raise UserError(
            f"a process that tokenises ended with code {code}; "
            + ("the system had no memory left: choose a smaller data.num_proc" if code == -9 else "it says why above")
        ) from error
    if isinstance(result, UserError):
        raise result
    return result


def _main() -> None:
    """Compute tasks from standard input, and write the results to standard output, both pickled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C, and ends this process
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently if the program was killed
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that is printed here goes to standard error, not among the answers
    tasks = sys.stdin.buffer
    with contextlib.suppress(
        EOFError, pickle.UnpicklingError
    ):  # the program has ended, perhaps in the middle of a task
        function = pickle.load(tasks)
        while True:
            task = pickle.load(tasks)
            try:
                result = function(task)
            except UserError as error:
                result = error
            pickle.dump(result, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


if __name__ == "__main__":
    _main()
