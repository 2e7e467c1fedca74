"""What a run writes and says about its updates: metrics, events, samples, the terminal."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

from unisono import dist
from unisono.build import Run
from unisono.config.schema import profiled_updates
from unisono.data.loader import UpdateBatch
from unisono.memory import peak_bytes
from unisono.metrics.display import Display
from unisono.metrics.profile import Profile
from unisono.metrics.record import Spans, update_lines
from unisono.optim import rate
from unisono.outcome import UpdateResult
from unisono.pulse import Pulse
from unisono.runfolder import RunFolder
from unisono.state import TrainState
from unisono.verdict import Setting, judge

SLOW = 3.0  # times the median of the others
SLOW_UPDATES = 3  # in a row
LEAST_SECONDS = 0.01  # below, a difference is noise


class Journal:
    """Writes and shows a run's updates; ``spans`` says where the time goes, and tells the pulse."""

    def __init__(self, run: Run, files: RunFolder, pulse: Pulse, *, first: int) -> None:
        self._run = run
        self._files = files
        self._pulse = pulse
        self._num_slow = [0] * run.world.size
        self.display = Display(first=first, total=run.total, every=run.config.log.every, speaks=run.world.is_first)
        profiled = profiled_updates(run.config.log)
        self._profile = Profile(profiled, files.path, rank=run.world.rank, say=self.display.say)
        self.spans = Spans(listener=self._entered)
        files.moment("session", update=first - 1, strategy=run.strategy.name, gradient_bytes=_gradient_bytes(run))
        self._look_closely(first)

    def update(self, batch: UpdateBatch, result: UpdateResult) -> None:
        """Write and show a finished update."""
        run, files = self._run, self._files
        if idle := result.idle(run.world.rank):
            self.spans.give("backward", idle)
        seconds, parts = self.spans.take_update()
        speed = batch.num_tokens / seconds
        lr = rate(run.config.optim, batch.number, run.total, run.peak)
        files.line(
            {
                "update": batch.number,
                "epoch": batch.epoch,
                "loss": result.loss,
                "num_targets": batch.num_targets,
                "num_tokens": batch.num_tokens,
                "lr": lr,
                "grad_norm": result.grad_norm,
                "stepped": result.stepped,
                "seconds": seconds,
                "tokens_per_second": speed,
                "seconds_by_cause": parts,
                "seconds_by_rank": {
                    "compute": [word.compute_seconds for word in result.words],
                    "data": [word.data_seconds for word in result.words],
                },
            }
        )
        files.moment("update", update=batch.number, data=parts.get("data", 0.0))
        files.ids(batch.number, batch.records)
        files.left_out(batch.number, batch.left_out)
        files.events.write(
            {
                "update": batch.number,
                "seconds": seconds,
                "spans": parts,
                "micro_batches": len(batch.micro_batches),
                "micro_batch_tokens": max(each.num_tokens for each in batch.micro_batches),
            }
        )
        self.display.update(
            batch.number, loss=result.loss, tokens_per_second=speed, rate=lr, grad_norm=result.grad_norm
        )
        self._pulse.finished(batch.number)
        self._look_for_slow_ranks(batch.number, result.own_seconds)
        self._look_closely(batch.number + 1)

    def note(self, what: str, state: TrainState) -> None:
        """Write how long something besides the updates took; the spans begin anew."""
        seconds, parts = self.spans.take()
        self._files.events.write({"kind": what, "update": state.update, "seconds": seconds, "spans": parts})
        self._files.moment(what, update=state.update)

    def close(self, update: int, *, is_whole: bool) -> None:
        """Collective. Write where the time of this session's updates went, and judge a run that is whole.

        Of waiting for data, the rank that waited most counts, since the others wait for it; and of memory the one that
        needed most.
        """
        self._files.moment("close", update=update)
        self._profile.close()
        session = self.spans.session
        if session.num_updates:
            own = {"data_wait_share": session.data_wait_share, "peak_memory_bytes": peak_bytes(self._run.world.device)}
            share, peak = (max(theirs) for theirs in zip(*dist.gather([float(value) for value in own.values()])))
            line = {"kind": "summary", "update": update, **asdict(session), "compute": self._run.precision.compute}
            self._files.line(line | {"data_wait_share": share, "peak_memory_bytes": int(peak)})
            self._files.events.write(line | own)
            self.display.say(session.sentence(share))
            if is_whole:
                self._judge(update)
        self.display.close()

    def _judge(self, update: int) -> None:
        """Say in words what held the run up (rank 0)."""
        if self._run.world.is_first:
            setting = Setting(_gradient_bytes(self._run), prefetch=self._run.config.data.prefetch)
            findings = judge(update_lines(self._files.path / "metrics.jsonl"), setting)
            self._files.line({"kind": "verdict", "update": update, "findings": [asdict(each) for each in findings]})
            for finding in findings:
                self.display.say(f"verdict: {finding.words}")

    def _look_closely(self, coming: int) -> None:
        """Begin or end the profile, if it is time; what that takes is told apart in the update that follows."""
        if self._profile.turns_at(coming):
            with self.spans.span("profile"):
                self._profile.turn()

    def _entered(self, cause: str) -> None:
        """Hear what the time belongs to from now on."""
        self._pulse.at(cause)
        self._profile.enter(cause)

    def _look_for_slow_ranks(self, update: int, own_seconds: list[float]) -> None:
        """Report, once, a rank that works three times as long as the others, update after update."""
        for rank, seconds in enumerate(own_seconds):
            others = median([*own_seconds[:rank], *own_seconds[rank + 1 :]] or [seconds])
            is_slow = seconds > SLOW * others and seconds - others > LEAST_SECONDS
            self._num_slow[rank] = self._num_slow[rank] + 1 if is_slow else 0
            if self._num_slow[rank] == SLOW_UPDATES:
                what = f"rank {rank} is slow: {seconds:.2f} s of work of its own in update {update}"
                self.display.say(f"{what}, the others {others:.2f} s; all wait for it (cores, GPU clock, disk of its?)")
                self._files.events.write({"kind": "slow", "update": update, "rank": rank, "own_seconds": own_seconds})


def _gradient_bytes(run: Run) -> int:
    return sum(parameter.nbytes for _, parameter in run.named)
