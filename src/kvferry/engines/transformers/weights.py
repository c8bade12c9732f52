"""Which weights a loaded model has, told from the tensors in its memory.

A model's directory does not say what was done to it after loading: adapters merged, layers replaced, a step
of training. So the tensors themselves are digested, small ones whole, of large ones evenly spaced pieces.
A change confined to bytes between the pieces is not seen; training changes whole tensors.
"""

import hashlib
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from kvferry.errors import MisconfiguredError
from kvferry.identity.stripes import checksum

FINGERPRINT_BYTES = 32
FORMAT_VERSION = 1
WHOLE_BYTES = 4 << 20
PIECES = 64
PIECE_BYTES = 64 << 10

_PERSON = b"kvferry-loaded"


def loaded_fingerprint(model: Any) -> bytes:
    """32 bytes for the parameters and buffers of a model: names, shapes, types and contents.

    MisconfiguredError where they are not in memory.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=_PERSON)
    digest.update(struct.pack("<I", FORMAT_VERSION))
    for name, tensor in _tensors(model):
        if tensor.device.type == "meta":
            raise MisconfiguredError(
                f"{name} is not in memory (offloaded?), so the model's weights cannot be told from others: "
                "load it without offloading"
            )
        head = f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        digest.update(struct.pack("<I", len(head)) + head)
        for piece in _pieces(tensor):
            digest.update(checksum(piece))
    return digest.digest()


def stamp(model: Any) -> int:
    """Changes when a tensor is replaced or written to in place. Cheap enough for every request."""
    return hash(
        tuple(
            (name, id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for name, tensor in _tensors(model)
        )
    )


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chain(model.named_parameters(), model.named_buffers())


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() <= WHOLE_BYTES:
        yield _bytes(flat)
        return
    last = flat.numel() - PIECE_BYTES
    for piece in range(PIECES):
        start = last * piece // (PIECES - 1)
        yield _bytes(flat[start : start + PIECE_BYTES])


def _bytes(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.cpu().numpy())
