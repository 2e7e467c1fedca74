"""Imported once by the fork server: what every rank needs and takes seconds to import."""

import peft  # noqa: F401
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
