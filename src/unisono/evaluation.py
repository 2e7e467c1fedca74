"""What is measured between updates: the exact loss of every validation set, and a few answers of the model.

Neither touches training: no gradient, no optimizer, and every update seeds what is random in it anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Any

import orjson

from unisono import dist
from unisono.build import Run, make_batches
from unisono.data.question import first_questions, question
from unisono.data.template import load_tokenizer
from unisono.greedy import end_tokens, greedy
from unisono.metrics.display import Display
from unisono.metrics.record import Spans
from unisono.model.answer import answer, answering
from unisono.model.load import base_model
from unisono.runfolder import RunFolder
from unisono.state import TrainState
from unisono.step import evaluate

CHUNK = 64  # samples a rank, spread and packed together
ALL = "all"  # the name of the line that stands for several sets together
NUM_SHOWN = 2
SHOWN_CHARACTERS = 70
Answer = dict[str, Any]


class Validation:
    """The validation sets of a run, measured where the run file says; without any, nothing is done."""

    def __init__(self, run: Run, files: RunFolder, display: Display) -> None:
        sets = run.inputs.data.validation
        self._run = run
        self._files = files
        self._display = display
        self._sets = {
            name: make_batches(run.config, run.inputs, s, run.world, run.strategy) for name, s in sets.items()
        }
        self._answers = Answers(run, files, display) if sets and run.config.validation.generate else None

    def measure(self, state: TrainState, spans: Spans, stop: Callable[[], bool]) -> bool:
        """Collective. Measure every set, and note in ``state`` the loss over all targets, by which checkpoints compare.

        ``stop`` is collective and asked between small pieces of work. False if it cut the measuring short: then all
        of it is to be done again.
        """
        if not self._sets:
            return True
        with spans.span("validation"):
            sums = self._sums(stop)
        if sums is None:
            return False
        total = (math.fsum(loss for loss, _ in sums.values()), sum(count for _, count in sums.values()))
        for name, (summed, num_targets) in (sums | ({ALL: total} if len(sums) > 1 else {})).items():
            loss = summed / num_targets
            line = {
                "kind": "validation",
                "update": state.update,
                **_name(name),
                "loss": loss,
                "num_targets": num_targets,
            }
            self._files.line(line)
            title = _title(f"validation after update {state.update}", name)
            self._display.say(f"{title}: loss {loss:.4f} over {num_targets:,} targets")
        if self._answers is not None:
            with spans.span("generation"):
                if not self._answers.ask(state.update, stop):
                    return False
        state.validated, state.validation_loss = state.update, total[0] / total[1]
        best = state.best_validation_loss
        state.best_validation_loss = state.validation_loss if best is None else min(best, state.validation_loss)
        return True

    def _sums(self, stop: Callable[[], bool]) -> dict[str, tuple[float, int]] | None:
        """Collective. Return the summed loss of every set, each target once, and the number of its targets."""
        run = self._run
        run.model.eval()
        try:
            return self._summed(stop)
        finally:
            run.model.train()

    def _summed(self, stop: Callable[[], bool]) -> dict[str, tuple[float, int]] | None:
        run = self._run
        mine, counts = [], []
        for name, batches in self._sets.items():
            num_samples = len(run.inputs.data.validation[name])
            summed, num_targets, num_done = 0.0, 0, 0
            for batch in batches.evaluation(CHUNK * run.world.size):
                self._display.busy(f"{_title('validating', name)}: {num_done:,} of {num_samples:,}")
                num_done += len(batch.records)
                summed += evaluate(run.model, batch.micro_batches, run.precision, run.world)
                num_targets += batch.num_targets
                if stop():
                    return None
            mine.append(summed)
            counts.append(num_targets)
        by_set = zip(*dist.gather(mine))
        return {name: (math.fsum(sums), count) for name, sums, count in zip(self._sets, by_set, counts)}


class Answers:
    """The first samples of every set, answered by the model as it is, and compared with what their records say.

    Needs the whole model on every rank. The ranks share the samples; the texts lie in the run folder.
    """

    def __init__(self, run: Run, files: RunFolder, display: Display) -> None:
        section, model = run.config.validation, run.config.model
        self._run = run
        self._files = files
        self._display = display
        self._causal_lm: Any = base_model(run.saved)
        self._tokenizer = load_tokenizer(run.inputs.folder, trust_remote_code=model.trust_remote_code)
        self._ends = end_tokens(self._causal_lm, self._tokenizer)
        self._samples = [
            (name, place)
            for name, store in run.inputs.data.validation.items()
            for place in first_questions(store, section.generate)
        ]
        self._say_where_the_context_ends(section.max_new_tokens)

    def ask(self, update: int, stop: Callable[[], bool]) -> bool:
        """Collective. Let every rank answer its part of the samples; write, count and show all of them on rank 0.

        False if ``stop`` cut it short.
        """
        world = self._run.world.size
        mine: list[Answer] = []
        with answering(self._causal_lm):
            answering_mine = self._answer_mine()
            for _ in range(-(-len(self._samples) // world)):
                mine.extend(islice(answering_mine, 1))
                if stop():
                    return False
        parts = [orjson.loads(text) for text in dist.gather_texts(orjson.dumps(mine).decode())]
        answers = [parts[number % world][number // world] for number in range(len(self._samples))]
        self._files.answers(update, answers)
        for name, group in groupby(answers, key=lambda each: str(each["set"])):
            theirs = list(group)
            num_exact = sum(each["is_exact"] for each in theirs)
            share, count = num_exact / len(theirs), len(theirs)
            self._files.line(
                {"kind": "generation", "update": update, **_name(name), "exact_match": share, "num_samples": count}
            )
            title = _title(f"answers after update {update}", name)
            self._display.say(f"{title}: {num_exact} of {count} exactly right ({share:.1%})")
        for each in answers[:NUM_SHOWN]:
            verdict = "right" if each["is_exact"] else f"expected {_short(each['expected'])}"
            self._display.say(f"  {_short(each['prompt'])}\n    -> {_short(each['answer'])}  ({verdict})")
        return True

    def _answer_mine(self) -> Iterator[Answer]:
        """Yield this rank's answers: sample k is answered by rank k % world."""
        run = self._run
        mine = self._samples[run.world.rank :: run.world.size]
        for number, (name, place) in enumerate(mine, 1):
            asked = question(run.inputs.data.validation[name], place)
            room = self._room(len(asked.prompt))
            doing = f"answering {number} of {len(mine)}"

            def show(num_tokens: int, doing: str = doing) -> None:
                self._display.busy(f"{doing}, {num_tokens} tokens")

            with run.precision.autocast():
                ids = answer(
                    self._causal_lm,
                    asked.prompt.tolist(),
                    settings=greedy(self._causal_lm, self._tokenizer, room),
                    ends=self._ends,
                    device=run.world.device,
                    on_token=show,
                )
            expected, found = self._text(asked.expected), self._text(ids)
            yield {
                "set": name,
                "record": asked.record,
                "prompt": self._tokenizer.decode(asked.prompt),
                "expected": expected,
                "answer": found,
                "is_exact": found.strip() == expected.strip(),
            }

    def _text(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _room(self, prompt_tokens: int) -> int:
        """Return how many tokens an answer may have: what is asked for, but no more than the context holds."""
        return min(self._run.config.validation.max_new_tokens, self._run.inputs.facts.context_tokens - prompt_tokens)

    def _say_where_the_context_ends(self, limit: int) -> None:
        stores, context = self._run.inputs.data.validation, self._run.inputs.facts.context_tokens
        num_cut = sum(self._room(len(question(stores[name], place).prompt)) < limit for name, place in self._samples)
        if num_cut:
            self._display.say(
                f"validate.max_new_tokens is {limit}, but after {num_cut} of {len(self._samples)} prompts the model's "
                f"context of {context} tokens has less room: these answers end there"
            )


def _name(name: str) -> dict[str, str]:
    return {"name": name} if name else {}


def _title(what: str, name: str) -> str:
    return f"{what}, {name}" if name else what


def _short(text: str) -> str:
    """Put a text on one line; of a long one the end, where the question is."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else f"... {line[-SHOWN_CHARACTERS:]}"
