"""Several programs at once: worker processes that compile into a store shared with the process that started them.

Most of a program's time is spent in one thread of Python and then in one C++ compiler, so two processes halve it. Jobs
go to a worker through its standard input as pickles, events come back as lines of JSON. The pickles only cross the pipe
between this process and a child that it started itself: nothing is ever unpickled that comes from a file or another
program.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch
from torch import Tensor, nn

from bluejay.compile.driver import compile, is_stored, require
from bluejay.compile.signature import named_weights
from bluejay.compile.store import Store
from bluejay.config import CompileSpec
from bluejay.events import Event, Observer, ignore
from bluejay.machine import available_memory_bytes, cpu, cxx_compiler

# What a worker needs while it compiles a step of any size: torch, Inductor, and one run of the C++ compiler.
WORKER_BYTES = 2**30
_SECONDS_TO_LEAVE = 5


@dataclass(frozen=True)
class Job:
    """Arguments of one `compile` call; module and examples may be on the meta device."""

    module: nn.Module
    example_inputs: tuple[Tensor, ...]
    label: str = ""
    device: str = "cpu"
    identity: Mapping[str, Any] = field(default_factory=dict)


def compile_all(
    jobs: Sequence[Job], spec: CompileSpec, store: Store, observe: Observer = ignore, *, workers: int = 0
) -> int:
    """See to it that the store has the program of every job; returns how many were compiled now.

    A store that cannot be written gives its warning and gets none: a program that is not kept is made where it is used.

    Args:
        workers: processes at once; 0 takes as many as cores, memory and jobs allow. One job, or one worker, is
            compiled in this process.

    Raises: as `compile`; without a compiler that works before anything is begun.
    """
    if spec.backend == "eager":
        return 0
    spec = replace(spec, threads=spec.threads or torch.get_num_threads())  # a worker has no threads of its own to ask
    missing = [
        job
        for job in jobs
        if not is_stored(job.module, job.example_inputs, spec, store, device=job.device, identity=job.identity)
    ]
    if missing:
        require(cxx_compiler(spec.cxx), spec, missing[0].label)
    if not missing or not store.can_keep(observe):
        return 0
    before = store.compilations
    allowed = workers or min(cpu().num_cores, max(1, available_memory_bytes() // (2 * WORKER_BYTES)))
    if min(allowed, len(missing)) > 1:
        missing = _in_workers(missing, spec, store, observe, min(allowed, len(missing)))
    for job in missing:
        compile(
            job.module,
            job.example_inputs,
            spec,
            store,
            observe,
            device=job.device,
            identity=job.identity,
            label=job.label,
        )
    return store.compilations - before


def _in_workers(jobs: list[Job], spec: CompileSpec, store: Store, observe: Observer, count: int) -> list[Job]:
    """Compile in worker processes; returns the jobs that failed there, which this process must speak for."""
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    failed: list[Job] = []
    warned: set[str] = set()
    lock = threading.Lock()

    def told(event: Event) -> None:
        with lock:
            store.compilations += event.name == "compile.done"
            text = str(event.fields.get("text", ""))
            if event.name != "warning" or text not in warned:  # each worker finds the same fault of the store
                observe(event)
            warned.add(text)

    def serve(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            try:
                job = todo.get_nowait()
            except queue.Empty:
                return
            done = False
            try:
                done = _hand_over(job, process, told)
            except Exception:  # whatever it is, a listener's fault too: this process meets it again and can raise it
                return  # and who knows what that worker is doing
            finally:
                if not done:
                    failed.append(job)

    processes: list[subprocess.Popen[bytes]] = []
    threads: list[threading.Thread] = []
    try:
        for _ in range(count):
            processes.append(_start(spec, store))
            threads.append(threading.Thread(target=serve, args=(processes[-1],), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
    finally:
        for process in processes:
            _end(process)
    while not todo.empty():  # every worker has died
        failed.append(todo.get_nowait())
    return failed


def _start(spec: CompileSpec, store: Store) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path[:] = {sys.path!r}; from bluejay.compile.workers import work; work()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        pickle.dump((spec, store.folder), process.stdin)
    return process


def _hand_over(job: Job, process: subprocess.Popen[bytes], told: Observer) -> bool:
    """Give a worker a job and pass on what it tells; whether the job was done."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        packed = pickle.dumps(_hollow(job))
    except Exception:  # what cannot be copied or named, such as a class within a function, stays in this process
        return False
    try:
        pickle.dump(packed, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:  # the worker is gone
        return False
    for line in process.stdout:
        message = json.loads(line)
        if "done" in message:
            return bool(message["done"])
        told(Event(message["event"], message["fields"]))
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a worker go; one that is busy is interrupted, so that it removes its own temporary files."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    process.stdout.close()


def _hollow(job: Job) -> Job:
    """The job without the content of any tensor."""

    def hollow(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    memo: dict[int, Any] = {}
    for tensor in named_weights(job.module).values():
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(hollow(tensor), requires_grad=False) if is_parameter else hollow(tensor)
    module = copy.deepcopy(job.module, memo)
    return replace(job, module=module, example_inputs=tuple(map(hollow, job.example_inputs)))


def work() -> None:
    """The life of a worker: jobs from standard input until it ends, lines of JSON to what was standard output."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes where people look for it

    def tell(message: Mapping[str, Any]) -> None:
        told.write(json.dumps(message) + "\n")
        told.flush()

    source = sys.stdin.buffer
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        spec, folder = pickle.load(source)
        store = Store(folder)
        for packed in _packed_jobs(source):
            try:
                job: Job = pickle.loads(packed)  # fails for a class that only the starter has: its main file's
                compile(
                    job.module,
                    job.example_inputs,
                    spec,
                    store,
                    lambda event: tell({"event": event.name, "fields": dict(event.fields)}),
                    device=job.device,
                    identity=job.identity,
                    label=job.label,
                )
                done = True
            except Exception:  # the starter compiles it again and says what is wrong, with the whole story
                done = False
            tell({"done": done})


def _packed_jobs(source: IO[bytes]) -> Iterator[bytes]:
    while True:
        yield pickle.load(source)
