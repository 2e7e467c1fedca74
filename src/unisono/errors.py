"""The errors that a person sees.

    UnisonoError                    exit code 1: the machine, a fault, a bug
    ├── UserError                   exit code 2: something the person can change
    │   ├── ConfigError             the run file or an override
    │   ├── DataError               a data file or a record in it
    │   │   └── TransferError       a server that does not give a file, or not all of it
    │   ├── ModelError              a model, tokenizer or template that cannot be used as asked
    │   ├── OutputError             the run folder cannot be written, or holds another run
    │   └── LaunchError             ports, ranks, devices
    ├── CheckpointError             a checkpoint that is not sound
    ├── NonFiniteError              exit code 3: the numbers are gone, loss or gradients are not finite
    └── OutOfMemoryError            exit code 5: a micro-batch does not fit

Every message says what is and what is needed, with the values; ``where`` is a place to open (file, line, key)
and ``hint`` is what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class UnisonoError(Exception):
    """An error that is shown without a stack of frames: what is, where, and what to do."""

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        """Render as ``where: message`` with the hint on a line of its own."""
        head = f"{self.where}: {self.message}" if self.where else self.message
        return f"{head}\n  hint: {self.hint}" if self.hint else head

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fields when the error travels between processes."""
        return _rebuild, (type(self), self.message, self.where, self.hint)


def _rebuild(kind: type[UnisonoError], message: str, where: str | None, hint: str | None) -> UnisonoError:
    return kind(message, where=where, hint=hint)


class UserError(UnisonoError):
    """The person can mend it: exit code 2."""

    exit_code = 2

    @classmethod
    def of(cls, problems: Sequence[UserError]) -> UserError:
        """Put all problems into one error, so that they are reported at once."""
        if len(problems) == 1:
            return problems[0]
        return cls(f"{len(problems)} problems\n" + "\n".join(str(problem) for problem in problems))


class ConfigError(UserError):
    """The run file or an override cannot be used."""


class DataError(UserError):
    """A data file or a record in it cannot be used."""


class TransferError(DataError):
    """A server did not give a file, or not all of it. Another start may get it, and goes on from what was done."""


class ModelError(UserError):
    """A model, tokenizer or chat template cannot be used as asked."""


class OutputError(UserError):
    """The run folder cannot be written, or it holds another run."""


class LaunchError(UserError):
    """The processes cannot be started as asked: ports, ranks, devices."""


class CheckpointError(UnisonoError):
    """A checkpoint is missing, torn or damaged."""


class NonFiniteError(UnisonoError):
    """Loss or gradients are not finite, and the run was told to stop. A restart would meet it again."""

    exit_code = 3


class OutOfMemoryError(UnisonoError):
    """A micro-batch does not fit in memory; ``retry_with`` are overrides under which it may."""

    exit_code = 5

    def __init__(
        self, message: str, *, where: str | None = None, hint: str | None = None, retry_with: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.retry_with = retry_with
