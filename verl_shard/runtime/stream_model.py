"""A model taken apart for streaming: which tensors travel with which block, which stay, and the hooks that do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from verl_shard.common.errors import config_error
from verl_shard.common.notices import notice
from verl_shard.common.units import format_bytes
from verl_shard.models.chain import no_split_classes, parts_in_order
from verl_shard.models.spec import device_of
from verl_shard.runtime.copies import Copies, CudaCopies
from verl_shard.runtime.offload_choice import Share
from verl_shard.runtime.stream_hooks import (
    BlockHook,
    EmbeddingHook,
    InputsHook,
    RootHook,
    attach,
    detach,
    hooks_of,
    own_tensors,
)  # fmt: skip
from verl_shard.runtime.streaming import BlockStream, HostBlock, weights_of

_OURS = (RootHook, BlockHook, EmbeddingHook, InputsHook)


@dataclass(frozen=True)
class Streamed:
    """A model that is streamed. Bytes of the host: pinned, and copied without being so."""

    root: RootHook
    pinned_bytes: int
    pageable_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Of buffers on devices, held right now."""
        return sum(stream.buffer_bytes for stream in self.root.streams)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, each once, in the order in which they run; none when it has no list of them."""
    named = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, str] = {}
    for part in parts_in_order(model, no_split_classes(model, None)):
        if part.place == "block" and part.name:
            found.setdefault(id(named[part.name]), part.name)
    return {name: named[name] for name in found.values()}


def host_embedding(model: nn.Module) -> nn.Embedding:
    """The input embedding, if it can stay on the host.

    Raises ConfigError for a model that has none, and where a head computes with the same weights: all would travel.
    """
    embedding = input_embedding(model)
    if embedding is None:
        why = f"{type(model).__name__} has no input embedding whose rows are only looked up"
        raise config_error("no-embedding", "embeddings_on_host", True, why, "Leave it out")
    ties = _ties(model, embedding)
    if ties:
        why = f"{ties[0]} computes with the weights of the input embedding, so that all rows would travel"
        raise config_error(
            "tied-embedding", "embeddings_on_host", True, why, "Leave it out: the embedding stays on the GPU"
        )
    return embedding


def input_embedding(model: nn.Module) -> nn.Embedding | None:
    """What transformers calls a model's input embedding, where it is a plain table."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        found = find() if callable(find) else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) and found.max_norm is None else None


def _ties(model: nn.Module, embedding: nn.Embedding) -> list[str]:
    """Other modules that hold the embedding's weights."""
    own = own_tensors(model)
    return [path for path, module, _, tensor in own if tensor is embedding.weight and module is not embedding]


def shared_tensors(model: nn.Module, blocks: Mapping[str, nn.Module]) -> frozenset[int]:
    """ids of tensors that a block shares with another block or with what is outside: they stay on the device."""
    inside = [{id(tensor) for _, _, _, tensor in own_tensors(block)} for block in blocks.values()]
    users = Counter(key for keys in inside for key in keys)
    of_blocks = {id(module) for block in blocks.values() for module in block.modules()}
    outside = {id(tensor) for _, module, _, tensor in own_tensors(model) if id(module) not in of_blocks}
    return frozenset(key for key, count in users.items() if count > 1 or key in outside)


def stream_model(
    model: nn.Module,
    placed: Mapping[str, torch.device],
    *,
    ahead: int = 2,
    prefetch: bool = False,
    embedding: nn.Embedding | None = None,
    pin_limit: int | None = None,
    copies: Callable[[torch.device], Copies] = CudaCopies,
) -> Streamed:
    """Streams the blocks of a model from the host to the devices of a map of names; {"": device} is one for all.

    embedding: the input embedding, if it stays on the host. copies: makes what copies to a device.
    Whatever fails, the model is left as it was.
    """
    blocks = blocks_of(model)
    assert blocks, "a model without blocks is refused before"
    dispatched = bool(hooks_of(model))
    engines = {device: copies(device) for device in dict.fromkeys(placed.values())}
    kept = shared_tensors(model, blocks)
    where = {name: _device(placed, name) for name in blocks}
    skip = getattr(model, "_skip_keys_device_placement", None)
    try:
        by_device: dict[torch.device, list[BlockHook]] = {}
        for name, module in blocks.items():
            engine = engines[where[name]]
            if len(engines) > 1 and not dispatched:
                attach(module, InputsHook(engine.device, skip))
            hook = BlockHook(HostBlock(name, module, kept), engine, pin_limit)
            attach(module, hook)
            by_device.setdefault(where[name], []).append(hook)
        streams = []
        for device, hooks in by_device.items():
            stream = BlockStream([hook.block for hook in hooks], engines[device], ahead, prefetch)
            for index, hook in enumerate(hooks):
                hook.join(stream, index)
            streams.append(stream)
        on_host = None
        if embedding is not None:
            path = next(path for path, module in model.named_modules() if module is embedding)
            on_host = EmbeddingHook(engines[_device(placed, path)], pin_limit)
            attach(embedding, on_host)
        travels = {id(tensor) for hooks in by_device.values() for hook in hooks for tensor in _of(hook)}
        if embedding is not None:
            travels.add(id(embedding.weight))
        resident = [
            (module, name, engines[_device(placed, f"{path}.{name}" if path else name)].device)
            for path, module, name, tensor in own_tensors(model)
            if id(tensor) not in travels
        ]
        if len(engines) > 1 and not dispatched:
            named = dict(model.named_modules(remove_duplicate=False))
            for part in parts_in_order(model, no_split_classes(model, None)):
                if part.place != "block" and part.name in named:
                    attach(named[part.name], InputsHook(engines[_device(placed, part.name)].device, skip))
        table = input_embedding(model)
        starts = [path for path, module in model.named_modules() if module is table] or list(blocks)
        first = engines[_device(placed, starts[0])].device
        root = RootHook(streams, on_host, None if dispatched else first, resident, skip)
        attach(model, root)
    except BaseException:
        undo_stream(model)
        raise
    return _counted(root, on_host)


def undo_stream(model: nn.Module) -> None:
    """Takes our hooks away, which puts the weights back, and leaves those of others."""
    detach(list(model.modules()), _OURS)


def _of(hook: BlockHook) -> list[torch.Tensor]:
    return [place.tensor for place in hook.block.places]


def _device(placed: Mapping[str, torch.device], name: str) -> torch.device:
    try:
        return device_of(placed, name)
    except KeyError:
        why = f"it gives no device for {name}"
        raise config_error("map-incomplete", "execution_device", None, why, "Use build_device_map") from None


def _counted(root: RootHook, embedding: EmbeddingHook | None) -> Streamed:
    """The bytes, and a notice when some could not be pinned."""
    held = [(block.buffer.n_bytes, block.buffer.pinned) for s in root.streams for block in s.blocks if block.buffer]
    if embedding is not None:
        held.append((embedding.n_bytes, embedding.pinned))
    pinned = sum(size for size, is_pinned in held if is_pinned)
    pageable = sum(size for size, is_pinned in held if not is_pinned)
    if pageable:
        total = format_bytes(pinned + pageable)
        why = f"{format_bytes(pageable)} of {total} could not be pinned: there is a limit, or the host has too little"
        notice("not-pinned", "offload", "stream", why, "pageable memory for that, which is copied several times slower")
    return Streamed(root, pinned, pageable)


def shares_of(model: nn.Module, placed: Mapping[str, torch.device]) -> list[tuple[Share, int]]:
    """What each device would hold, with no head-room yet, and the bytes of the model that it holds now."""
    blocks = blocks_of(model)
    kept = shared_tensors(model, blocks)
    embedding = input_embedding(model)
    if embedding is not None and _ties(model, embedding):
        embedding = None
    shares = []
    for device in dict.fromkeys(placed.values()):
        seen: dict[int, int] = {}
        held = table = leaf = 0
        for path, module in model.named_modules():
            own = 0
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None or _device(placed, f"{path}.{name}" if path else name) != device:
                    continue
                size = tensor.numel() * tensor.element_size()
                own += size
                if id(tensor) not in seen:
                    held += size if tensor.device == device else 0
                    table += size if embedding is not None and tensor is embedding.weight else 0
                seen[id(tensor)] = size
            leaf = max(leaf, own)
        sizes = [
            sum(seen[id(tensor)] for tensor in weights_of(block, kept))
            for name, block in blocks.items()
            if _device(placed, name) == device
        ]
        weights, largest = sum(seen.values()), max(sizes, default=0)
        shares.append((Share(str(device), weights, sum(sizes), largest, table, leaf, 0), held))
    return shares
