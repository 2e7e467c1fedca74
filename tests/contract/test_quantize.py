"""QLoRA: frozen weights in 4 bits. The forward and the gradients are those of the rounded weights, on any world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, numbers_of, train_until_killed, train_whole, weights_of
from support.updates import Settings, assert_same_step, train_updates

LORA = {"rank": 4, "alpha": 8.0}
PACKED = Settings(lora=LORA, quantize="nf4", updates=3, global_size=4)


def load(folder: Path, **keys: Any) -> Any:
    """Load a tiny model on this process."""
    import torch

    from unisono.config.schema import LoraSection, ModelSection
    from unisono.model.load import base_model, load_model

    section = ModelSection(path=str(folder), lora=LoraSection(**LORA), **keys)
    return base_model(load_model(section, folder, weights=torch.float32, seed=1))


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_products_and_gradients_are_those_of_the_rounded_weight(compute: str) -> None:
    import torch

    from unisono.model.quantize import Nf4Linear
    from unisono.precision import DTYPES

    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 96)
    packed = Nf4Linear(plain, plain.weight.detach())
    rounded = packed.whole(torch.float32)
    spread = float((rounded - plain.weight).detach().abs().max() / plain.weight.detach().abs().max())
    assert 0 < spread < 0.2, "NF4's widest gap is 0.3 of the block's largest value"
    with torch.no_grad():
        plain.weight.copy_(rounded)
    hidden = torch.randn(7, 128)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    with torch.autocast("cpu", dtype=DTYPES[compute], enabled=compute != "fp32"):
        mine, other = packed(ours), plain(theirs)
    assert mine.dtype == other.dtype
    tolerance = 1e-6 if compute == "fp32" else 2e-2
    assert torch.allclose(mine.float(), other.float(), atol=tolerance)
    mine.float().square().sum().backward()
    other.float().square().sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=10 * tolerance)


def test_all_linear_layers_but_the_head_are_packed_and_counted_as_what_they_are(tiny: Path) -> None:
    import torch

    from unisono.model.quantize import Nf4Linear, num_parameters

    plain, packed = load(tiny), load(tiny, quantize="nf4")
    linear = {name for name, each in plain.named_modules() if type(each) is torch.nn.Linear and "lora" not in name}
    found = {name for name, each in packed.named_modules() if isinstance(each, Nf4Linear)}
    assert found == {name for name in linear if name != "lm_head"} and found
    assert num_parameters(packed) == sum(parameter.numel() for parameter in plain.parameters())
    weight = packed.get_submodule(min(found)).weight
    assert weight.dtype == torch.uint8 and 2 * weight.numel() == plain.get_submodule(min(found)).weight.numel()
    assert not any(parameter.is_meta for parameter in packed.parameters())


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (3, "fsdp2")])
def test_training_equals_that_of_a_model_with_rounded_weights(
    tiny: Path, tmp_path: Path, world: int, strategy: str
) -> None:
    """The reference is full-width: each weight rounded beforehand, then trained as any other."""
    import torch
    from transformers import AutoModelForCausalLM

    from unisono.model.quantize import Nf4Linear

    rounded, packed = AutoModelForCausalLM.from_pretrained(tiny), load(tiny, quantize="nf4")
    with torch.no_grad():
        for name, layer in packed.named_modules():
            if isinstance(layer, Nf4Linear):
                rounded.get_submodule(name.removesuffix(".base_layer")).weight.copy_(layer.whole(torch.float32))
    rounded.save_pretrained(tmp_path / "rounded")
    plain = Settings(lora=LORA, updates=3, global_size=4, packed=False, attention="sdpa")
    expected = run_ranks(train_updates, 1, tmp_path / "rounded", plain)[0][0]
    for (trace,) in run_ranks(train_updates, world, tiny, replace(PACKED, strategy=strategy)):
        assert trace.losses == pytest.approx(expected.losses, abs=1e-5)
        assert_same_step(trace, expected, tolerance=1e-5)


def test_a_killed_run_goes_on_and_hands_over_its_adapter(tiny: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"length": {"updates": 6}, "model": {"lora": LORA, "quantize": "nf4"}}
    whole = make_run(tmp_path, tiny, name="whole", **sections)
    killed = make_run(tmp_path, tiny, name="killed", **sections)
    said = train_whole(2, whole)
    assert "warning" not in said
    train_until_killed(2, killed, 5)
    assert "resumed update-00000004" in train_whole(2, killed)
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    assert numbers_of(tmp_path / "killed") == numbers_of(tmp_path / "whole")
    sharded = make_run(tmp_path, tiny, name="sharded", **sections)
    train_until_killed(2, sharded, 5, "strategy.name=fsdp2")
    assert "resumed update-00000004" in train_whole(3, sharded, "strategy.name=fsdp2")
    adapter = weights_of(tmp_path / "whole")
    for name, value in weights_of(tmp_path / "sharded").items():
        np.testing.assert_allclose(value, adapter[name], atol=1e-5)
    assert all("lora_" in name for name in adapter)
    assert any(np.abs(value).max() > 0 for name, value in adapter.items() if "lora_B" in name)
