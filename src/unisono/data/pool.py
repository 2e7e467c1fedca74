"""Encode blocks on all cores, in order, with a bounded number of them under way.

Small work stays in this process. The processes are forked from a server that has loaded the tokenizer's library once,
and they are sent the tokenizer, so that none of them loads torch. They end with this process, whatever ends it. Ctrl-C
is this process's alone: it waits while processes are started or ended, so that it leaves none of them half done.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from unisono.allocator import find_allocator
from unisono.data.block import Block, BlockEncoder, Encoded
from unisono.data.job import Job
from unisono.data.template import load_tokenizer
from unisono.errors import UnisonoError

_PRELOADED = ["unisono.data.block", "transformers.tokenization_utils_tokenizers"]
_UNDER_WAY = 3  # blocks of a worker: one in work, one waiting, one finished out of order

Encode = Callable[[Iterator[Block]], Iterator[Encoded]]
_encoder: BlockEncoder | None = None  # of a worker process


@contextmanager
def encoding(job: Job, num_workers: int, *, preload: bool) -> Iterator[Encode]:
    """Give a function from blocks to what became of them, in the same order.

    preload: let the worker processes start with a faster memory allocator, if there is one: tokenising takes about a
    quarter less time then.
    """
    tokenizer = load_tokenizer(job.tokenizer_dir, trust_remote_code=job.trust_remote_code)
    if num_workers == 1:
        encoder = BlockEncoder(job, tokenizer)
        yield lambda blocks: map(encoder, blocks)
        return
    sent = None if job.trust_remote_code else tokenizer  # code that came with a model is found by its folder only
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    library = find_allocator() if preload and sys.platform == "linux" else None
    resource_tracker.ensure_running()  # first, since its start ends the waiting of signals
    with _undisturbed(), _preloaded(library):
        forkserver.ensure_running()
    pool = ProcessPoolExecutor(num_workers, mp_context=server, initializer=_start, initargs=(job, sent))
    try:
        yield lambda blocks: _in_order(pool, blocks, _UNDER_WAY * num_workers)
    finally:
        with _undisturbed():  # a second Ctrl-C in here would leave a pool that nobody ends
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait until this is over; processes that are started meanwhile never get it.

    The mask is for those processes, which inherit it. It does not suffice here: libraries have threads without it, and
    what reaches one of them is answered by the main thread, which alone may set what answers.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    answer = signal.getsignal(signal.SIGINT)
    if is_main and answer is not None:  # None: not of Python's making, and Python could not put it back
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if is_main and answer is not None:
            signal.signal(signal.SIGINT, answer)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _preloaded(library: Path | None) -> Iterator[None]:
    """Name a library to what is started meanwhile, unless something is preloaded already."""
    if library is None or "LD_PRELOAD" in os.environ:
        yield
        return
    os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]


def _in_order(pool: ProcessPoolExecutor, blocks: Iterator[Block], limit: int) -> Iterator[Encoded]:
    waiting: deque[Future[Encoded]] = deque()
    try:
        for block in blocks:
            waiting.append(_submit(pool, block))
            while len(waiting) > limit or (waiting and waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise _killed() from error


def _submit(pool: ProcessPoolExecutor, block: Block) -> Future[Encoded]:
    """Give a block to the pool, which may start a process for it."""
    try:
        with _undisturbed():
            return pool.submit(_encode, block)
    except (EOFError, ConnectionError) as error:  # the server that starts them is gone
        raise _killed() from error


def _killed() -> UnisonoError:
    return UnisonoError(
        "a process that prepares data was killed",
        where="preparing data",
        hint="memory is the usual cause: look at the kernel's log; what was prepared is kept, start again",
    )


def _start(job: Job, tokenizer: Any) -> None:
    """Begin life as a worker: end with the main process, leave Ctrl-C to it, use one core."""
    global _encoder
    threading.Thread(target=_end_with_main, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if tokenizer is None:
        tokenizer = load_tokenizer(job.tokenizer_dir, trust_remote_code=job.trust_remote_code)
    _encoder = BlockEncoder(job, tokenizer)


def _end_with_main() -> None:
    """Wait for the main process, whatever ends it: the kernel tells a worker only of its server's death."""
    main = multiprocessing.parent_process()
    assert main is not None, "a worker has a main process"
    main.join()
    os._exit(1)


def _encode(block: Block) -> Encoded:
    assert _encoder is not None, "the pool starts its workers with _start"
    return _encoder(block)
