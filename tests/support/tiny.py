"""A byte tokenizer and a two-layer model, made in milliseconds and saved as a plain transformers folder.

TOK of the field cases: ids 0-255 are the bytes, BOS 256, EOS 257, PAD 258. TOK-E: the same with PAD = EOS.
"""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
VOCABULARY = 264


def save_tokenizer(folder: Path, *, pad_is_eos: bool = False, chat_template: str | None = CHATML) -> Path:
    """Write the byte tokenizer into ``folder``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in _bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<pad>")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>" if pad_is_eos else "<pad>",
        model_max_length=4096,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def _bytes_to_unicode() -> dict[int, str]:
    """Map every byte to the printable character that ByteLevel uses for it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + k) for k, byte in enumerate(others)})
    return table


def save_tiny(
    folder: Path,
    *,
    tied: bool = False,
    pad_is_eos: bool = False,
    chat_template: str | None = CHATML,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    **config: object,
) -> Path:
    """Write TINY (two layers, width 32, two heads, fp32) with its tokenizer into ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257 if pad_is_eos else 258,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    model.save_pretrained(folder)
    save_tokenizer(folder, pad_is_eos=pad_is_eos, chat_template=chat_template)
    return folder
