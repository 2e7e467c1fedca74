"""Imported once by the fork server: what every rank needs and takes seconds to import."""

import gc

import peft  # noqa: F401
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

import unisono.train  # noqa: F401

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
# every run ends with a collection; the modules' own objects need not be looked at, nor their pages copied
gc.collect()
gc.freeze()
