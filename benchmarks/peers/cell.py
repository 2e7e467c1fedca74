"""A cell of the table: what is trained, how, on how many processes. Written ``bf16/full/2/16`` or ``.../demo``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

PRECISIONS = ("bf16", "fp32")
METHODS = ("full", "lora")
DATA = ("gsm8k", "demo")


@dataclass(frozen=True)
class Cell:
    """Number format of the products, full or lora, processes, samples an update, and of which data."""

    precision: str
    method: str
    ranks: int
    global_size: int
    data: str = DATA[0]

    def __str__(self) -> str:
        return f"{self.precision}/{self.method}/{self.ranks}/{self.global_size}/{self.data}"

    @property
    def of_reference(self) -> Cell:
        """The cell whose reference judges this one: the number of processes changes nothing."""
        return replace(self, ranks=1)


def parse(text: str) -> Cell:
    """Read a cell; SystemExit with what is allowed when it is none."""
    parts = text.split("/")
    if len(parts) == 4:
        parts.append(DATA[0])
    if (
        len(parts) != 5
        or parts[0] not in PRECISIONS
        or parts[1] not in METHODS
        or not parts[2].isdigit()
        or not parts[3].isdigit()
        or parts[4] not in DATA
    ):
        raise SystemExit(
            f"error: --cells: {text!r} is no cell\nhint: bf16|fp32 / full|lora / processes / samples an update "
            "[/ gsm8k|demo], for example bf16/full/2/16"
        )
    return Cell(parts[0], parts[1], int(parts[2]), int(parts[3]), parts[4])


def every() -> Iterator[Cell]:
    """Yield the whole table's cells, the most telling ones first."""
    for data, size, method, precision, ranks in product(DATA, (16, 64), METHODS, PRECISIONS, (2, 1)):
        yield Cell(precision, method, ranks, size, data)
