"""Fine-tune language models on the GPUs you own: the same model on any number of them."""

__version__ = "0.1.0"
