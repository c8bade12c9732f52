"""Which weights a loaded model has, told from the tensors in its memory.

A model's directory does not say what was done to it after loading: adapters merged, layers replaced, a step
of training. So the tensors themselves are digested, small ones whole, of large ones evenly spaced pieces.
A change confined to bytes between the pieces is not seen; training changes whole tensors.

While a model is in use its tensors are watched. torch counts what is written to a tensor, but not what is
written through ``.data``, numpy or a kernel, so their contents are looked at as well.
"""

import hashlib
import struct
from collections.abc import Iterator
from functools import lru_cache
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

# What is looked at before every load: small tensors whole, of others elements at fixed random places.
SAMPLE_WHOLE_BYTES = 4096
SAMPLE_ELEMENTS = 64
# What is looked at before every save as well: everything, where that is in this host's memory and not more.
READ_WHOLE_BYTES = 1 << 30

_PERSON = b"kvferry-loaded"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


class WeightsWatch:
    """Whether a model's tensors are still those of when this was made. Threads may share it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stamp = _stamp(model)
        self._sample = _sample(model)
        self._contents = self._read()

    def changed(self) -> bool:
        """Whether one was replaced or written to in place, as far as a sample shows. For every request."""
        return _stamp(self._model) != self._stamp or _sample(self._model) != self._sample

    def changed_between(self) -> bool:
        """Whether one was written to where ``changed`` does not look, by reading every byte if affordable.

        Before every save, after ``changed``: what is stored, others will use.
        """
        return self._read() != self._contents

    def _read(self) -> bytes:
        tensors = [tensor for _, tensor in _tensors(self._model)]
        if sum(tensor.nbytes for tensor in tensors) > READ_WHOLE_BYTES:
            return b""
        return b"".join(checksum(_bytes(_flat(tensor))) for tensor in tensors if tensor.device.type == "cpu")


def _stamp(model: Any) -> int:
    return hash(
        tuple(
            (name, id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for name, tensor in _tensors(model)
        )
    )


def _sample(model: Any) -> bytes:
    """A digest of the sampled elements. One transfer for each device and type, not for each tensor."""
    taken: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for _, tensor in _tensors(model):
            if tensor.device.type == "meta":
                continue
            words = _words(tensor.detach())
            if tensor.nbytes > SAMPLE_WHOLE_BYTES:
                words = torch.take(words, _places(words.numel(), words.device))
            taken.setdefault((words.device, words.dtype), []).append(words.reshape(-1))
        pieces = [checksum(_bytes(_flat(torch.cat(some)))) for some in taken.values()]
    return checksum(b"".join(pieces))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: bits are compared, and not every type can be gathered."""
    word = _WORDS.get(tensor.itemsize)
    return tensor.view(word) if word is not None else _flat(tensor)


@lru_cache(maxsize=512)
def _places(count: int, device: torch.device) -> torch.Tensor:
    """Of the sampled elements. Equal tensors are sampled alike; the first and the last belong to it."""
    generator = torch.Generator().manual_seed(count)
    places = torch.randint(count, (SAMPLE_ELEMENTS,), generator=generator)
    places[0], places[-1] = 0, count - 1
    return places.to(device)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chain(model.named_parameters(), model.named_buffers())


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = _flat(tensor)
    if flat.numel() <= WHOLE_BYTES:
        yield _bytes(flat)
        return
    last = flat.numel() - PIECE_BYTES
    for piece in range(PIECES):
        start = last * piece // (PIECES - 1)
        yield _bytes(flat[start : start + PIECE_BYTES])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _bytes(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.cpu().numpy())
