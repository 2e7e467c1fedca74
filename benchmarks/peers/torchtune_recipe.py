"""torchtune: its recipes for full fine-tuning and LoRA, for one device and for several, on token ids.

SmolLM2 is its Llama 3.2 without scaled rotations. In bf16 its recipes keep the weights in bf16, too.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torchtune
from job import BETAS, EPS, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, SEED, Job, answer
from omegaconf import OmegaConf
from work import Clock, held_out_loss


class Tokenizer:
    """All that a recipe asks of a tokenizer where the data is token ids already."""

    pad_id = 0


def samples(_: Tokenizer, job: str) -> list[dict[str, list[int]]]:
    """Return the data set of the configuration."""
    return [{"tokens": ids, "labels": labels} for ids, labels in Job.read(job).samples()]


def model_of(job: Job) -> dict[str, Any]:
    """Return the model's part of the configuration."""
    facts = json.loads((Path(job.model) / "config.json").read_text())
    shape = {
        "vocab_size": facts["vocab_size"],
        "num_layers": facts["num_hidden_layers"],
        "num_heads": facts["num_attention_heads"],
        "num_kv_heads": facts["num_key_value_heads"],
        "embed_dim": facts["hidden_size"],
        "intermediate_dim": facts["intermediate_size"],
        "max_seq_len": facts["max_position_embeddings"],
        "norm_eps": facts["rms_norm_eps"],
        "rope_base": int(facts["rope_parameters"]["rope_theta"]),
        "scale_factor": 1,
    }
    module = "torchtune.models.llama3_2._component_builders"
    if job.method == "full":
        return {"_component_": f"{module}.llama3_2", **shape}
    return {
        "_component_": f"{module}.lora_llama3_2",
        **shape,
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
    }


def settings(job: Job, file: str) -> dict[str, Any]:
    """Return the configuration of a recipe."""
    return {
        "output_dir": f"{job.folder}/out",
        "model": model_of(job),
        "tokenizer": {"_component_": "torchtune_recipe.Tokenizer"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": job.model,
            "checkpoint_files": ["model.safetensors"],
            "output_dir": f"{job.folder}/out",
            "model_type": "LLAMA3_2",
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": True,
        "dataset": {"_component_": "torchtune_recipe.samples", "job": file},
        "seed": SEED,
        "shuffle": False,
        "batch_size": job.micro_size,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "lr": job.rate,
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": 0.0,
            "fused": True,
        },
        "optimizer_in_bwd": False,
        "lr_scheduler": {"_component_": "torchtune_recipe.constant"} if job.method == "lora" else None,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "epochs": 1,
        "max_steps_per_epoch": job.updates,
        "gradient_accumulation_steps": job.accumulation,
        "clip_grad_norm": MAX_GRAD_NORM,
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": f"{job.folder}/logs",
        },
        "log_every_n_steps": 1,
        "device": "cpu",
        "dtype": job.precision,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
    }


def constant(optimizer: Any, **_: Any) -> Any:
    """Return the scheduler that a LoRA recipe must have, of a constant rate."""
    from torch.optim.lr_scheduler import ConstantLR

    return ConstantLR(optimizer, factor=1.0)


def recipe_class(job: Job) -> Any:
    """Return the recipe; its file is run by ``tune run``, and is in no package."""
    kind = "distributed" if job.ranks > 1 else "single_device"
    folder = Path(torchtune.__file__).parents[1] / "recipes"
    spec = spec_from_file_location("recipe", folder / f"{job.method}_finetune_{kind}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    name = {"full": "FullFinetuneRecipe", "lora": "LoRAFinetuneRecipe"}[job.method]
    return module.__dict__[name + ("Distributed" if job.ranks > 1 else "SingleDevice")]


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    config = OmegaConf.create(settings(job, sys.argv[1]))
    recipe = recipe_class(job)(cfg=config)
    recipe.setup(cfg=config)
    recipe.train()

    def logits_of(ids: Any) -> Any:
        found = recipe._model(ids)
        return torch.cat(found, dim=1) if isinstance(found, list) else found

    recipe._model.eval()
    loss = held_out_loss(logits_of, job)
    if int(os.environ["RANK"]) == 0:
        versions = {name: version(name) for name in ("torch", "torchtune", "torchao")}
        answer(
            seconds=clock.seconds[: job.updates],
            first_at=clock.first_at,
            tokens=job.tokens(),
            loss=loss,
            versions=versions,
        )
    recipe.cleanup()


if __name__ == "__main__":
    main()
