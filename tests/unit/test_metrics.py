"""Seconds by cause, the waiting share, what the display says between updates, and scalars of named sets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from unisono.metrics import display as display_module
from unisono.metrics.display import Display
from unisono.metrics.record import Session, Spans
from unisono.metrics.trackers import TensorBoard


def session_of(*updates: tuple[float, float]) -> Session:
    """Each update is (seconds of waiting for data, seconds of the step)."""
    session = Session()
    for data, step in updates:
        session.add({"data": data, "step": step, "other": 0.0})
    return session


def test_the_first_batch_is_counted_apart() -> None:
    session = session_of((5.0, 1.0), (0.5, 3.0), (0.0, 5.5))
    assert session.num_updates == 3 and session.first_wait_seconds == 5.0
    assert session.seconds_by_cause == {"data": 5.5, "step": 9.5, "other": 0.0}
    assert session.data_wait_share == pytest.approx(0.5 / 10.0)
    assert session_of((5.0, 1.0)).data_wait_share == 0.0 and Session().data_wait_share == 0.0


def test_the_waiting_share_is_said() -> None:
    said = session_of((0.25, 1.0)).sentence(0.003)
    assert said == "waited 0.3% of the time for data (besides 0.2 s for the first batch)"


def test_only_updates_count_for_the_session() -> None:
    spans = Spans()
    with spans.span("validation"):
        pass
    spans.take()
    with spans.span("data"):
        time.sleep(0.01)
    spans.enter("forward")
    total, parts = spans.take_update()
    assert spans.session.num_updates == 1 and spans.session.seconds_by_cause["data"] >= 0.01
    assert sum(parts.values()) == pytest.approx(total, abs=1e-9) and parts.keys() == {"data", "forward", "other"}
    assert "validation" not in spans.session.seconds_by_cause


def test_a_log_file_hears_of_long_work_once_in_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    speaker, silent = (Display(first=1, total=2, every=1, speaks=speaks) for speaks in (True, False))
    for seconds in (0, 20, 31, 40, 62):
        now[0] = 100.0 + seconds
        speaker.busy(f"answering, {seconds} s")
        silent.busy("not heard")
    assert capsys.readouterr().out.splitlines() == ["answering, 31 s", "answering, 62 s"]


def test_a_terminal_sees_progress_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    display = Display(first=1, total=2, every=1, speaks=True)
    display.busy("answering 3 of 16, 57 tokens")
    assert display._bar is not None
    assert display._bar.tasks[0].fields["text"] == "answering 3 of 16, 57 tokens"
    display.close()


def test_named_sets_have_scalars_of_their_own() -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, *scalar: Any) -> None:
            written.append(scalar)

    board = TensorBoard.__new__(TensorBoard)
    board._writer = Writer()
    board.write({"update": 3, "loss": 1.0})
    board.write({"kind": "validation", "update": 3, "loss": 2.0})
    board.write({"kind": "validation", "update": 3, "name": "math", "loss": 3.0})
    assert written == [("train/loss", 1.0, 3), ("validation/loss", 2.0, 3), ("validation/math/loss", 3.0, 3)]
