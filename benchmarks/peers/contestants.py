"""Who is measured, and with which settings: a row of the table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Contestant:
    """A row of the table. ``script`` runs under torchrun, unless it is a launcher itself.

    ``environment``: the one its packages are in; the empty name is the one that most share. ``sampling`` and
    ``weights``: see Job. ``precisions``: the cells it takes part in. ``preloaded``: mimalloc is preloaded into its
    processes; unisono does so by itself, and is told not to where false.
    """

    script: str
    words: str
    environment: str = ""
    launches: bool = False
    micro_size: int = 2
    sampling: str = "sequential"
    weights: str = "fp32"
    precisions: tuple[str, ...] = ("fp32", "bf16")
    preloaded: bool = False


CONTESTANTS: Mapping[str, Contestant] = {
    "reference": Contestant("reference.py", "the reference: one process, a sample at a time", micro_size=1),
    "tutorial": Contestant("tutorial.py", "the loop of a tutorial, padded"),
    "tutorial-4": Contestant("tutorial.py", "the same, micro-batch 4", micro_size=4),
    "tutorial-8": Contestant("tutorial.py", "the same, micro-batch 8", micro_size=8),
    "tutorial+mimalloc": Contestant("tutorial.py", "the same, mimalloc preloaded", preloaded=True),
    "trainer": Contestant("hf_trainer.py", "transformers Trainer, padded"),
    "trainer-grouped": Contestant("hf_trainer.py", "transformers Trainer, group_by_length", sampling="group_by_length"),
    "trainer-bf16": Contestant(
        "hf_trainer.py",
        "transformers Trainer, group_by_length, weights in bf16",
        sampling="group_by_length",
        weights="bf16",
        precisions=("bf16",),
    ),
    "accelerate": Contestant("accelerate_loop.py", "a loop on accelerate, padded"),
    "trl-padded": Contestant("trl_sft.py", "TRL SFTTrainer, padded"),
    "trl-balanced": Contestant("trl_sft.py", "TRL SFTTrainer, batch_rebalance", sampling="batch_rebalance"),
    "trl-packed": Contestant("trl_sft.py", "TRL SFTTrainer, packed (bfd, SDPA)", micro_size=8, sampling="packed"),
    "trl-balanced+mimalloc": Contestant(
        "trl_sft.py", "TRL SFTTrainer, batch_rebalance, mimalloc preloaded", sampling="batch_rebalance", preloaded=True
    ),
    "fabric": Contestant("fabric_loop.py", "a loop on Lightning Fabric, padded"),
    "litgpt": Contestant("litgpt_finetune.py", "LitGPT finetune, padded", environment="litgpt"),
    "factory": Contestant("factory_cli.py", "LLaMA-Factory, padded", environment="factory"),
    "torchtune": Contestant(
        "torchtune_recipe.py", "torchtune, padded (weights in bf16 where bf16)", environment="torchtune"
    ),
    "unisono": Contestant("ours.py", "unisono, its defaults (it preloads mimalloc)", launches=True, preloaded=True),
    "unisono-plain": Contestant("ours.py", "unisono, launch.allocator=none", launches=True),
}
# GSM8K padded to the longest of a micro-batch has 1.18, 1.35, 1.52 times its tokens for micro-batches of 2, 4, 8.
DEFAULT = tuple(
    name for name in CONTESTANTS if name not in ("reference", "tutorial-4", "tutorial-8") and "mimalloc" not in name
)
REFERENCE = "reference"
OURS = "unisono"
