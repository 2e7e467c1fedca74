"""The shape of a decoder, read from its config.json, and its parameters by formula.

Known families are listed in ``FAMILIES``; another one has no formula, since one that merely looks plausible would plan
nonsense: it is ``Traced``. ``tests/unit/test_plan_architecture.py`` compares the counts with transformers' own models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import ModelError


@dataclass(frozen=True)
class Family:
    """What distinguishes a family: biases, norms of queries and keys, norms in a block, experts."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2  # in a block, each of the hidden size
    is_tied: bool = False  # unless config.json says otherwise
    head: int | None = None  # size, unless config.json says otherwise: hidden size / heads


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "smollm3": Family(is_tied=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head=128),
    "gemma": Family(is_tied=True, head=256),
    "gemma2": Family(norms=4, is_tied=True, head=256),
    "gemma3_text": Family(qk_norm=True, norms=4, is_tied=True, head=256),
    "phi3": Family(),
    "mixtral": Family(),
    "qwen3_moe": Family(qk_norm=True),
}
_MIXTURES = ("mixtral", "qwen3_moe")


@dataclass(frozen=True)
class Kept:
    """Bytes that a block keeps for backward, as they were traced: by token, and by pair of tokens of a document."""

    by_token: float
    by_pair: float


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder; ``experts`` is 1 for a dense one."""

    family: str
    hidden: int
    layers: int
    heads: int
    head: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    attention_bias: bool  # on queries, keys and values
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norms: int
    experts: int = 1
    experts_per_token: int = 1
    kept: Kept | None = None  # by formula, where it is None

    @property
    def attention(self) -> int:
        """Width of all queries."""
        return self.heads * self.head

    @property
    def key_value(self) -> int:
        """Width of all keys, and of all values."""
        return self.key_value_heads * self.head

    @property
    def attention_weights(self) -> int:
        """Values in a block's query, key, value and output matrices."""
        return self.hidden * (2 * self.attention + 2 * self.key_value)

    @property
    def mlp_weights(self) -> int:
        """Values in a block's gate, up and down matrices, of all experts."""
        return 3 * self.hidden * self.intermediate * self.experts

    @property
    def matrices(self) -> int:
        """Values in a block's linear layers (without a router)."""
        return self.attention_weights + self.mlp_weights

    @property
    def block(self) -> int:
        """Parameters of a block."""
        biases = self.attention_bias * (self.attention + 2 * self.key_value) + self.output_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        router = self.hidden * self.experts if self.experts > 1 else 0
        norms = self.norms * self.hidden + self.qk_norm * 2 * self.head
        return self.matrices + biases + router + norms

    @property
    def embedding(self) -> int:
        """Values of the embedding; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self.layers * self.block + self.embedding * (1 if self.is_tied else 2) + self.hidden

    def adapters(self, rank: int, targets: str | list[str]) -> int:
        """Parameters of LoRA adapters: rank x (in + out) of every target."""
        return self.layers * sum(rank * (a + b) for a, b in self.linear(targets).values())

    def linear(self, targets: str | list[str] = "all-linear") -> dict[str, tuple[int, int]]:
        """Return a block's linear layers as (in, out), those that ``targets`` names."""
        h, f = self.hidden, self.intermediate
        if self.family == "phi3":
            known = {
                "qkv_proj": (h, self.attention + 2 * self.key_value),
                "o_proj": (self.attention, h),
                "gate_up_proj": (h, 2 * f),
                "down_proj": (f, h),
            }
        else:
            known = {
                "q_proj": (h, self.attention),
                "k_proj": (h, self.key_value),
                "v_proj": (h, self.key_value),
                "o_proj": (self.attention, h),
            }
            if self.experts == 1:  # peft leaves experts alone: they are no linear layers in transformers 5
                known |= {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}
        return {n: size for n, size in known.items() if targets == "all-linear" or n in targets}


@dataclass(frozen=True)
class Traced(Architecture):
    """An architecture without formulas, as ``model.trace`` counted it for the settings of one run file.

    Products are taken to be those of all its matrices: of a mixture that is more than a token goes through.
    """

    counted: int = 0
    counted_block: int = 0
    counted_matrices: int = 0
    counted_adapters: int = 0

    @property
    def attention_weights(self) -> int:
        """All matrices of a block: which of them are attention's is not known."""
        return self.counted_matrices

    @property
    def mlp_weights(self) -> int:
        """None: see ``attention_weights``."""
        return 0

    @property
    def block(self) -> int:
        """Parameters of a block, in the mean."""
        return self.counted_block

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.counted

    def adapters(self, rank: int, targets: str | list[str]) -> int:
        """Parameters of the adapters that were traced, whatever is asked."""
        return self.counted_adapters


def traced(found: dict[str, Any], *, name: str) -> Traced:
    """Make an architecture of what ``model.trace`` found, field by field."""
    hidden, heads = found["hidden"], found["heads"]
    return Traced(
        family=name,
        hidden=hidden,
        layers=found["layers"],
        heads=heads,
        head=hidden // heads,
        key_value_heads=heads,
        intermediate=0,
        vocabulary=found["vocabulary"],
        is_tied=found["is_tied"],
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        norms=0,
        kept=Kept(found["kept_by_token"], found["kept_by_pair"]),
        counted=found["parameters"],
        counted_block=found["block"],
        counted_matrices=found["matrices"],
        counted_adapters=found["trained"],
    )


def unknown(folder: Path) -> str | None:
    """Return the name of a model's architecture if there are no formulas for it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = str(config.get("text_config", config).get("model_type"))
    return None if name in FAMILIES else name


def read_architecture(folder: Path) -> Architecture:
    """Read a model folder's config.json. Raises ModelError for a family without formulas."""
    return architecture_of(json.loads((folder / "config.json").read_text(encoding="utf-8")), where=str(folder))


def architecture_of(config: dict[str, Any], *, where: str) -> Architecture:
    """Understand a configuration, as transformers writes it."""
    if "text_config" in config:
        config = config["text_config"]
    name = str(config.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(
            f"there are no formulas for the architecture {name!r}; there are for {', '.join(FAMILIES)}",
            where=f"{where}: config.json",
            hint="train tries the fullest micro-batch before update 1, whatever the architecture",
        )
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    is_mixture = name in _MIXTURES
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 1) if is_mixture else 1
    width = config.get("moe_intermediate_size") if name == "qwen3_moe" else None
    return Architecture(
        family=name,
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        head=int(config.get("head_dim") or family.head or hidden // heads),
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        intermediate=int(width or config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        is_tied=bool(config.get("tie_word_embeddings", family.is_tied)),
        attention_bias=family.qkv_bias or bool(config.get("attention_bias", False)),
        output_bias=bool(config.get("attention_bias", False)) and not family.qkv_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        norms=family.norms,
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 1) if is_mixture else 1,
    )
