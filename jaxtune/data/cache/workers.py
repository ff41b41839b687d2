"""Processes that compute a function of one task after another.

They are started as this module, so that they import neither jax nor the program that starts them, and end with it.
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

_AHEAD = 2  # tasks for each process that are waiting or computed before their turn


def mapped(function: Callable[[Any], Any], tasks: Iterable[Any], processes: int) -> Iterator[Any]:
    """function(task) of each task, in their order, computed by so many processes.

    The function, the tasks and the results are pickled. A UserError that the function or `tasks` raises is raised
    when the results before it have been taken.
    """
    with contextlib.ExitStack() as stack:
        threads = ThreadPoolExecutor(processes)
        stack.callback(threads.shutdown)
        started = [stack.enter_context(_started()) for _ in range(processes)]
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)  # the first to be called
        idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        pickled = pickle.dumps(function)
        for process in started:  # they import what they need at the same time
            assert process.stdin is not None
            process.stdin.write(pickled)
            idle.put(process)

        def compute(task: Any) -> Any:
            process = idle.get()
            try:
                return _answer(process, task)
            finally:
                idle.put(process)

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
def _started() -> Iterator[subprocess.Popen]:
    # Each process is to use one core; a tokenizer would start threads for all cores.
    more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
    command, pipe = [sys.executable, "-m", "jaxtune.data.cache.workers"], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout):
            assert end is not None
            with contextlib.suppress(BrokenPipeError):
                end.close()


def _answer(process: subprocess.Popen, task: Any) -> Any:
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(task, process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        code = process.wait()
        raise UserError(
            f"a process that tokenises ended with code {code}; "
            + ("the system had no memory left: choose a smaller data.num_proc" if code == -9 else "it says why above")
        ) from error
    if isinstance(result, UserError):
        raise result
    return result


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which ends this process
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a word if the program was killed
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything here prints is no answer
    tasks = sys.stdin.buffer
    with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the program has ended, perhaps amid a task
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
