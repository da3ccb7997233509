"""The weights of a model that only scores, off its GPU while nobody asks it, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl_shard.runtime.offload import offload_of


class Parked:
    """A model whose weights can be taken off their devices and brought back, as often as one likes.

    The host keeps its copy: weights that nobody trains need be brought down only once. Weights that offload_model keeps on
    the host stay there; what they hold of the GPU is given back.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._away: dict[torch.Tensor, torch.device] = {}
        self._host: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def is_away(self) -> bool:
        """Whether the model cannot compute until `restore`."""
        return bool(self._away)

    def release(self) -> int:
        """Takes the weights off their GPUs; the bytes that this frees there."""
        told = offload_of(self._model)
        if told is not None and told.how != "none":
            told.release()
            return 0
        freed = 0
        for tensor in self._tensors():
            if tensor.device.type in ("cpu", "meta"):
                continue
            self._away[tensor] = tensor.device
            freed += tensor.untyped_storage().nbytes()
            if tensor not in self._host:
                self._host[tensor] = tensor.data.to("cpu")
            tensor.data = self._host[tensor]
        if freed:
            torch.cuda.empty_cache()
        return freed

    def restore(self) -> None:
        """Brings the weights back to where they were; nothing to do when they are there."""
        for tensor, device in self._away.items():
            tensor.data = self._host[tensor].to(device)
        self._away.clear()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Each parameter and buffer once: tied ones are the same object."""
        yield from self._model.parameters()
        yield from self._model.buffers()
