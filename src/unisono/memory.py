"""Memory: the fullest micro-batch is tried before update 1; and running out is said in words, with a smaller budget.

A rank that has run out cannot go on by itself: the others wait for it in an exchange. So it leaves with the override
that a new start of all ranks is to use. The global batch stays as it is, and so does the result (law 6).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from unisono.build import Run, micro_tokens
from unisono.data.stream import StreamPlan
from unisono.errors import OutOfMemoryError
from unisono.optim import moments

LEAST_TOKENS = 64  # a smaller micro-batch saves nothing worth having


def try_fullest(run: Run, say: Callable[[str], None]) -> None:
    """Collective. Take forward and backward of the fullest micro-batch of the whole run, and forget them.

    Beside it lies what the optimizer will have made in its first step. Weights, optimizer, order and what is random in
    an update stay as they are. A stream's longest sample is not known: nothing is tried.
    """
    train = run.inputs.data.train
    if isinstance(train, StreamPlan):
        return
    size = run.config.batch
    batch, samples = run.batches_of(train).fullest(size.global_size, size.global_tokens)
    lengths = train.lengths[samples]
    what = f"the fullest micro-batch ({len(samples)} samples, {lengths.sum():,} tokens, the longest {lengths.max():,})"
    begin = time.monotonic()
    with memory_named(run, lambda: f"{what}, its longest sample is record {train.record[samples[:1]][0]}"):
        to_come = [each.fill_(1) for _, parameter in run.kept for each in moments(run.config.optim, parameter)]
        with run.strategy.microbatch(last=True, is_tried=True):
            with run.precision.autocast():
                loss = run.model(**batch.inputs(run.world.device))
            run.strategy.backward(loss / len(lengths))
        del to_come
    run.strategy.zero(run.optimizer)
    say(f"{what} fits: {time.monotonic() - begin:.1f} s, {peak_words(run.world.device)}")


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has had so far: of the GPU if it has one, else of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_words(device: torch.device) -> str:
    """Say the peak, on a GPU beside what there is."""
    peak = f"peak {peak_bytes(device) / 2**30:.2f}"
    if device.type == "cuda":
        return f"{peak} of {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
    return f"{peak} GiB a process"


@contextmanager
def memory_named(run: Run, where: Callable[[], str]) -> Iterator[None]:
    """Turn an allocation that failed inside into OutOfMemoryError; ``where`` says at what."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _named(run, where()) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's allocator of the CPU has no error of its own
            raise
        raise _named(run, where()) from error


def _named(run: Run, where: str) -> OutOfMemoryError:
    budget, retry = smaller(run)
    if retry:
        # the planner is not to change its mind in the next start: what it settled is named there
        retry += tuple(each for each in run.settled if not each.startswith("batch."))
        return OutOfMemoryError(f"out of memory with {budget}", where=where, retry_with=retry, hint=f"try {retry[0]}")
    return OutOfMemoryError(
        f"out of memory with {budget}, and no smaller one would help",
        where=where,
        hint="set model.activation_checkpointing=full, lower data.max_length, use model.lora or strategy.name=fsdp2",
    )


def smaller(run: Run) -> tuple[str, tuple[str, ...]]:
    """Return the budget in words, and the override for a smaller one; none if the largest sample fills it alone."""
    size = run.config.batch.micro_size
    if size is not None:
        less = next((n for n in range(size // 2, 0, -1) if size % n == 0), None)
        return f"batch.micro_size {size}", (f"batch.micro_size={less}",) if less else ()
    tokens, train = micro_tokens(run.config, run.inputs, run.world), run.inputs.data.train
    longest = 1 if isinstance(train, StreamPlan) else train.longest
    helps = tokens > max(longest, LEAST_TOKENS)
    less_tokens = max(tokens // 2, min(longest, tokens), LEAST_TOKENS)
    return f"batch.micro_tokens {tokens:,}", (f"batch.micro_tokens={less_tokens}",) if helps else ()
