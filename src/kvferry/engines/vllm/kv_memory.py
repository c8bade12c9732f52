"""The engine's KV memory as it is registered: one layout, and one copier, for each KV group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.engines.vllm.copy import BlockCopier, CpuBlockCopier, Fence
from kvferry.engines.vllm.layout import BlockLayout, LayerView, plan_layout
from kvferry.engines.vllm.memory import HugePages, copying_cores
from kvferry.errors import MisconfiguredError


def tensors(kv_cache: Any) -> tuple[Any, ...]:
    """Of one layer: attention registers one, a layer with recurrent state one for each kind of state."""
    return tuple(kv_cache) if isinstance(kv_cache, list | tuple) else (kv_cache,)


def layer_views(kv_caches: Mapping[str, Any]) -> tuple[dict[str, list[LayerView]], list[Any]]:
    """The registered tensors in bytes, by layer, and their distinct storages as flat uint8 tensors."""
    import torch

    storages: list[Any] = []
    numbers: dict[int, int] = {}
    views: dict[str, list[LayerView]] = {}
    for name, kv_cache in kv_caches.items():
        views[name] = []
        for at, tensor in enumerate(tensors(kv_cache)):
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(numbers))
            if number == len(storages):
                storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            item = tensor.element_size()
            views[name].append(
                LayerView(
                    name=f"{name}.{at}" if at else name,
                    storage=number,
                    offset=tensor.storage_offset() * item,
                    shape=tuple(tensor.shape),
                    strides=tuple(stride * item for stride in tensor.stride()),
                    item_bytes=item,
                )
            )
    return views, storages


class KvMemory:
    """The engine's registered KV memory: each group's layout and what copies to and from it.

    groups: the registered layers of each group; none, where this rank has none of them. part_blocks: how
    many blocks a part of each group holds at most.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, Any],
        *,
        groups: Sequence[Iterable[str]],
        blocks: int,
        part_blocks: Sequence[int],
    ) -> None:
        views, storages = layer_views(kv_caches)
        self.layouts: list[BlockLayout | None] = []
        for layers in groups:
            found = [view for name in layers for view in views[name]]
            self.layouts.append(plan_layout(found, blocks=blocks) if found else None)
        if not any(self.layouts):
            raise MisconfiguredError("the engine registered no KV cache tensors")
        self.device = str(storages[0].device.type)
        self.cores = copying_cores()
        self._pages: list[HugePages] = []
        if self.device == "cpu":
            arrays = [storage.numpy() for storage in storages]
            self.copiers: list[BlockCopier | None] = [
                CpuBlockCopier(layout, arrays) if layout else None for layout in self.layouts
            ]
            self._pages = [
                HugePages(storage.data_ptr(), storage.numel(), cores=self.cores) for storage in storages
            ]
        else:
            from kvferry.engines.vllm.cuda_copy import CudaBlockCopier

            self.copiers = [
                CudaBlockCopier(layout, storages, blocks_per_part=held) if layout else None
                for layout, held in zip(self.layouts, part_blocks, strict=True)
            ]

    def fence(self) -> Fence | None:
        """What the engine has queued so far; None where it works synchronously."""
        return next(copier.fence() for copier in self.copiers if copier is not None)

    def wait_for_pages(self, timeout_s: float) -> bool:
        """Whether huge pages are in place everywhere they will be."""
        return all(pages.wait(timeout_s) for pages in self._pages)

    def close(self) -> None:
        """Before the engine's memory goes away."""
        for pages in self._pages:
            pages.close()
        for copier in self.copiers:
            if copier is not None:
                copier.close()
