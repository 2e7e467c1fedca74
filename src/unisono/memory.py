"""Out of memory in a micro-batch: said in words, with the smaller budget to try.

A rank that has run out cannot go on by itself: the others wait for it in an exchange. So it leaves with the override
that a new start of all ranks is to use. The global batch stays as it is, and so does the result (law 6).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.build import Run, micro_tokens
from unisono.data.stream import StreamPlan
from unisono.errors import OutOfMemoryError
from unisono.state import TrainState

LEAST_TOKENS = 64  # a smaller micro-batch saves nothing worth having


@contextmanager
def memory_named(run: Run, state: TrainState) -> Iterator[None]:
    """Turn an allocation that failed inside into OutOfMemoryError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _named(run, state) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's allocator of the CPU has no error of its own
            raise
        raise _named(run, state) from error


def _named(run: Run, state: TrainState) -> OutOfMemoryError:
    budget, retry = smaller(run)
    where = f"update {state.update + 1}"
    if retry:
        return OutOfMemoryError(f"out of memory with {budget}", where=where, retry_with=retry, hint=f"try {retry[0]}")
    return OutOfMemoryError(
        f"out of memory with {budget}, and no smaller one would help",
        where=where,
        hint="set model.activation_checkpointing=true, lower data.max_length, use model.lora or strategy.name=fsdp2",
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
