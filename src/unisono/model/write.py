"""Write the weights of a whole model one tensor at a time: what is sharded is gathered tensor by tensor.

Ranks that do not write hold one whole tensor at a time, and so does the one that writes. Only for models whose tensors
have the names of the files that they came from: what transformers joins at loading, it has to take apart again itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from unisono.model.stream import files_by_name

FILE_BYTES = 50 * 10**9  # of weights in a file, as transformers cuts them
FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
Pieces = Iterator[tuple[str, torch.Tensor]]


def named_once(model: Any, source: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of ``model`` by the names they have in the files of ``source``; None if one has none.

    A tied tensor has one name.
    """
    files = files_by_name(source)
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    found = {next((each for each in known if each in files), ""): tensor for tensor, known in names.items()}
    return None if "" in found or any(each.dtype not in FORMATS for each in found.values()) else found


def gathered(tensors: dict[str, torch.Tensor], *, keeps: bool) -> Pieces:
    """Collective: every rank takes all of it. Yield whole tensors, on the CPU of the rank that ``keeps`` them."""
    for name, tensor in tensors.items():
        data = tensor.detach()
        whole = data.full_tensor() if isinstance(data, DTensor) else data
        yield name, whole.cpu() if keeps else torch.empty(0)
        del data, whole  # before the next one is gathered


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], pieces: Pieces) -> None:
    """Write safetensors files into ``folder``, with an index where there are several.

    ``tensors`` say format and shape; ``pieces`` are their values, in the same order.
    """
    groups = _groups(tensors)
    many = len(groups) > 1
    files = [
        f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" if many else "model.safetensors"
        for k in range(len(groups))
    ]
    for file, names in zip(files, groups):
        with (folder / file).open("wb") as out:
            _write_header(out, {name: tensors[name] for name in names})
            for name in names:
                given, values = next(pieces)
                assert given == name, "pieces come in the order of the tensors"
                out.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
    if many:
        index = {
            "metadata": {"total_size": sum(each.nbytes for each in tensors.values())},
            "weight_map": {name: file for file, names in zip(files, groups) for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _groups(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    return groups


def _write_header(out: BinaryIO, tensors: dict[str, torch.Tensor]) -> None:
    """Write what safetensors begins with: the length of a JSON text, then that: each tensor's format, shape, place."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
