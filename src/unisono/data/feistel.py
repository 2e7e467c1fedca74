"""A permutation of any number of values that is computed place by place and never stored.

Proof that it is one. The values are split into a high and a low half of their bits. A round adds to one half (xor) a
function of the other, which it leaves as it is; the same round undoes it, so a round is a bijection whatever the
function, and so are several, on ``range(2**bits)``. Of these only ``range(num_values)`` is wanted: a value that falls
outside is sent through again until it falls inside ("cycle-walking", Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"). That ends, because a bijection's cycle comes back to where it began, which is inside; and no two
values meet, because walking the cycles backwards leads each one home. ``2**bits < 2 * num_values``, so a value is sent
through less than twice on average.

Only integer arithmetic of our own: a new numpy release cannot change the order of an old run. This is no cipher.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

NUM_ROUNDS = 16  # with fewer, some orders of 5 to 7 samples are seen measurably more often than others
MAX_BITS = 62
_BLOCK = 1 << 14  # values sent through at a time: their intermediate results stay in the processor's cache


def permuted(places: Indices, num_samples: int, seed: int, *path: int) -> Indices:
    """Return what stands at ``places`` of the permutation of ``range(num_samples)`` numbered (seed, path).

    ``path`` are integers that tell the permutations of a run apart: the epoch, or a source and its pass. Memory is of
    the order of ``len(places)``. Each of seed and path is in ``range(2**64)``, else OverflowError.
    """
    return Feistel(num_samples, seed, *path).at(places)


def _mix(values: Words) -> Words:
    """Mix 64 bits by splitmix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable generators")."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Words = values ^ (values >> np.uint64(31))
        return mixed


@dataclass(frozen=True)
class _Half:
    """Half of a value's bits: ``num_bits`` of them from ``shift`` on."""

    shift: int
    num_bits: int


class Feistel:
    """A keyed permutation of ``range(num_values)``, both ways."""

    def __init__(self, num_values: int, seed: int, *path: int) -> None:
        if not 1 <= num_values <= 1 << MAX_BITS:
            raise ValueError(f"a permutation of {num_values:,} values; 1 to 2**{MAX_BITS} are possible")
        self.num_values = num_values
        num_bits = max(2, (num_values - 1).bit_length())
        low = num_bits // 2
        self._halves = (_Half(0, low), _Half(low, num_bits - low))
        key = np.zeros(1, np.uint64)
        for part in (seed, *path):
            key = _mix(key ^ np.uint64(part))
        self._keys = _mix(key ^ np.arange(NUM_ROUNDS, dtype=np.uint64))

    def at(self, places: Indices) -> Indices:
        """Return the values at ``places`` of the permutation."""
        return self._walk(places, range(NUM_ROUNDS))

    def place_of(self, values: Indices) -> Indices:
        """Return the places at which ``values`` stand: the inverse of ``at``."""
        return self._walk(values, range(NUM_ROUNDS)[::-1])

    def _walk(self, values: Indices, rounds: range) -> Indices:
        if values.size and (int(values.min()) < 0 or int(values.max()) >= self.num_values):
            raise IndexError(f"a place outside of range({self.num_values:,})")
        walked = np.empty(len(values), np.int64)
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK].astype(np.uint64)
            self._send_through(block, rounds)
            outside = np.flatnonzero(block >= np.uint64(self.num_values))
            while outside.size:
                again = block[outside]
                self._send_through(again, rounds)
                block[outside] = again
                outside = outside[again >= np.uint64(self.num_values)]
            walked[start : start + len(block)] = block
        return walked

    def _send_through(self, values: Words, rounds: range) -> None:
        """Apply the rounds to ``values`` in place; a round's function is a multiplicative mix of the other half."""
        with np.errstate(over="ignore"):
            for number in rounds:
                given, changed = self._halves[number % 2], self._halves[1 - number % 2]
                mixed = values >> np.uint64(given.shift)
                mixed &= np.uint64((1 << given.num_bits) - 1)
                mixed ^= self._keys[number]
                mixed *= np.uint64(0xBF58476D1CE4E5B9)
                mixed ^= mixed >> np.uint64(32)
                mixed *= np.uint64(0x94D049BB133111EB)
                mixed >>= np.uint64(64 - changed.num_bits)  # the high bits of a product depend on all bits
                mixed <<= np.uint64(changed.shift)
                values ^= mixed
