"""Which failure is the cause, and the words for it."""

from __future__ import annotations

import pytest

from unisono.launch.failure import Failure, first_failure, tell

LOST = "Traceback\nRuntimeError: connection closed by peer"
CAUSE = "Traceback\nValueError: bad weights"


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        # the first of two errors, though the later one is listed first
        ([Failure(0, 1, 10.02, LOST), Failure(1, 1, 10.01, CAUSE)], 1),
        # what the agent ended is never the cause
        ([Failure(0, -15, 9.0), Failure(1, 1, 10.5, CAUSE)], 1),
        ([Failure(0, -15, 9.0), Failure(1, 3, 10.0)], 1),
        # a rank killed from outside is seen after the error of its peer, but is the cause of it
        ([Failure(0, 1, 10.2, LOST), Failure(1, -9, 11.0)], 1),
        # a rank that did not listen was killed by the agent after its grace
        ([Failure(0, -9, 16.0), Failure(1, 1, 10.2, CAUSE)], 1),
        # an abort after another rank's error came of it
        ([Failure(0, -6, 11.0), Failure(1, 1, 10.2, CAUSE)], 1),
        ([Failure(0, -9, 10.0), Failure(1, -9, 9.0)], 1),
        ([Failure(1, -15, 10.0)], 1),
    ],
)
def test_first_failure(failures: list[Failure], cause: int) -> None:
    assert first_failure(failures).rank == cause
    assert first_failure(failures[::-1]).rank == cause


def test_b39_the_cause_is_told_last_and_the_others_in_a_line() -> None:
    told = tell(
        [Failure(0, 1, 10.02, LOST), Failure(1, 1, 10.01, CAUSE), Failure(2, -15, 10.0)], 3, "the run has failed"
    )
    assert told == (
        "unisono: rank 0 of 3 failed too: RuntimeError: connection closed by peer\n"
        "unisono: rank 1 of 3 failed (exit code 1); the run has failed\n" + CAUSE
    )


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Failure(0, 2, 1.0, "model.path: no such folder\n", plain=True), "error: model.path: no such folder"),
        (Failure(0, -9, 1.0), "error: it was killed from outside (SIGKILL) and could leave no error"),
        (Failure(0, -11, 1.0), "error: it was ended by SIGSEGV; what it said before is above"),
        (Failure(0, -60, 1.0), "error: it was ended by signal 60; what it said before is above"),
        (Failure(0, 7, 1.0), "error: it ended with exit code 7 and left no error; what it said before is above"),
    ],
)
def test_every_end_has_its_words(failure: Failure, words: str) -> None:
    assert tell([failure], 1, "").splitlines()[1] == words
