"""Who is measured, and with which settings: a row of the table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Contestant:
    """A row of the table. ``script`` runs under torchrun, unless it is a launcher itself.

    ``preloaded``: mimalloc is preloaded into its processes. unisono does so by itself, and is told not to where false.
    """

    script: str
    words: str
    launches: bool = False
    micro_size: int = 4
    packed: bool = False
    balanced: bool = False
    preloaded: bool = False


CONTESTANTS: Mapping[str, Contestant] = {
    "tutorial-4": Contestant("tutorial.py", "the loop of a tutorial, padded, micro-batch 4"),
    "tutorial-8": Contestant("tutorial.py", "the loop of a tutorial, padded, micro-batch 8", micro_size=8),
    "tutorial-2": Contestant("tutorial.py", "the loop of a tutorial, padded, micro-batch 2", micro_size=2),
    "tutorial-2+mimalloc": Contestant(
        "tutorial.py", "the same, micro-batch 2, mimalloc preloaded", micro_size=2, preloaded=True
    ),
    "tutorial-4+mimalloc": Contestant("tutorial.py", "the same, micro-batch 4, mimalloc preloaded", preloaded=True),
    "trl-padded": Contestant("trl_sft.py", "TRL SFTTrainer, padded, micro-batch 4"),
    "trl-balanced": Contestant(
        "trl_sft.py", "TRL SFTTrainer, padded, batch_rebalance, micro-batch 2", micro_size=2, balanced=True
    ),
    "trl-packed": Contestant("trl_sft.py", "TRL SFTTrainer, packed (bfd, SDPA)", packed=True),
    "trl-balanced+mimalloc": Contestant(
        "trl_sft.py",
        "the same as trl-balanced, mimalloc preloaded",
        micro_size=2,
        balanced=True,
        preloaded=True,
    ),
    "trl-packed+mimalloc": Contestant(
        "trl_sft.py", "the same as trl-packed, mimalloc preloaded", packed=True, preloaded=True
    ),
    "unisono": Contestant("ours.py", "unisono, its defaults (it preloads mimalloc)", launches=True, preloaded=True),
    "unisono-plain": Contestant("ours.py", "unisono, launch.allocator=none", launches=True),
}
# GSM8K padded to the longest of a micro-batch has 1.18, 1.35, 1.52 times its tokens for micro-batches of 2, 4, 8.
DEFAULT = ("tutorial-2", "trl-balanced", "trl-packed", "unisono", "unisono-plain")
OURS = "unisono"
