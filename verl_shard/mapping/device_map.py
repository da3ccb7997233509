"""DeviceMap: which module is on which device, as the dict that `from_pretrained(device_map=...)` takes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from verl_shard.common.errors import config_error
from verl_shard.common.files import write_whole
from verl_shard.common.tables import as_text, table
from verl_shard.common.units import format_bytes
from verl_shard.mapping.devices import DeviceId, device_label, parse_device
from verl_shard.models.spec import Block

SCHEMA = "verl_shard/device_map/1"


@dataclass(frozen=True)
class Stage:
    """What one device holds."""

    device: DeviceId
    pieces: tuple[str, ...]
    """Its pieces in order of execution, for people: runs of blocks are written "model.layers.0-5"."""
    n_blocks: int
    weight_bytes: int
    buffer_bytes: int
    cap: int | None = None
    """The bytes it may hold; None is no limit."""
    cache_bytes: int = 0
    """KV cache, where it is counted."""
    peak_bytes: int | None = None
    """The peak of training; None in a map for inference."""

    @property
    def n_bytes(self) -> int:
        """What the map balances: the peak of training, or weights, buffers and KV cache."""
        if self.peak_bytes is not None:
            return self.peak_bytes
        return self.weight_bytes + self.buffer_bytes + self.cache_bytes


class DeviceMap(dict[str, DeviceId]):
    """A dict of module names to devices that cannot be changed, with what each device holds beside it.

    Pass it as it is to `load_sharded`, or to `from_pretrained(device_map=...)` of transformers.
    """

    stages: tuple[Stage, ...]
    """One for each device in the order in which the model runs through them."""
    model: str
    """The model that it was made for."""
    dtype: str
    purpose: str
    counts: str
    """In words, what the bytes of a stage are."""

    def __init__(
        self,
        device_map: Mapping[str, Any],
        stages: tuple[Stage, ...] = (),
        *,
        model: str = "",
        dtype: str = "",
        purpose: str = "inference",
        counts: str = "weights and buffers",
    ) -> None:
        super().__init__({name: parse_device(device, f"device_map[{name!r}]") for name, device in device_map.items()})
        self.stages, self.model, self.dtype, self.purpose, self.counts = stages, model, dtype, purpose, counts

    @property
    def loads(self) -> dict[DeviceId, int]:
        """The bytes that the map balances, on each device that is used: see Stage.n_bytes."""
        return {stage.device: stage.n_bytes for stage in self.stages}

    def report(self, width: int = 100) -> str:
        """A table for people: for each device its pieces, bytes, share of the whole, and head-room below its limit.

        width: of the table, in characters.
        """
        total = sum(self.loads.values())
        limited = any(stage.cap is not None for stage in self.stages)
        trained = self.purpose == "training"
        columns = ["device", "holds", "blocks", *(["weights", "peak"] if trained else ["bytes", "share"])]
        rows = []
        for stage in self.stages:
            share = f"{stage.n_bytes / total:.1%}" if total else "-"
            weights = format_bytes(stage.weight_bytes + stage.buffer_bytes)
            sizes = [weights, format_bytes(stage.n_bytes)] if trained else [format_bytes(stage.n_bytes), share]
            row = [device_label(stage.device), ", ".join(stage.pieces), stage.n_blocks, *sizes]
            if limited:
                row.append("no limit" if stage.cap is None else format_bytes(stage.cap - stage.n_bytes))
            rows.append(row)
        columns += ["head-room"] if limited else []
        fullest = max(self.stages, key=lambda stage: stage.n_bytes, default=None)
        if trained and fullest is not None:
            heading = f"{self.model}: {self.counts}: {format_bytes(fullest.n_bytes)} on the fullest"
            heading += f", {device_label(fullest.device)}" if len(self.stages) > 1 else ""
        else:
            heading = f"{self.model}: {format_bytes(total)} of {self.counts}" + (
                f" ({self.dtype})" if self.dtype else ""
            )
            if len(self.stages) > 1 and total and fullest is not None:
                ratio = fullest.n_bytes * len(self.stages) / total
                heading += f"; the fullest, {device_label(fullest.device)}, holds {ratio:.3f} x an even share"
        return as_text(width, heading, table("", columns, rows))

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes: JSON-ready, opening with the schema."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "dtype": self.dtype,
            "purpose": self.purpose,
            "counts": self.counts,
            "device_map": dict(self),
            "stages": [asdict(stage) for stage in self.stages],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the map as JSON, whole or not at all."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of what each device holds, as a PNG. Raises MissingExtraError without matplotlib."""
        from verl_shard.mapping.picture import draw

        draw(self, Path(path))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], where: str = "device_map") -> DeviceMap:
        """The map that `to_dict` gave. Raises ConfigError for anything else."""
        schema = record.get("schema") if isinstance(record, Mapping) else None
        if schema != SCHEMA:
            raise config_error(
                "not-a-device-map", where, schema, f'its "schema" is not "{SCHEMA}"', "Give what DeviceMap.save wrote"
            )
        try:
            stages = tuple(Stage(**{**stage, "pieces": tuple(stage["pieces"])}) for stage in record["stages"])
            names = {name: record[name] for name in ("model", "dtype", "purpose", "counts")}
            return cls(record["device_map"], stages, **names)
        except (KeyError, TypeError, AttributeError) as error:
            why = f"a field is missing or wrong ({error})"
            raise config_error("not-a-device-map", where, None, why, "Give what DeviceMap.save wrote") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceMap:
        """The map that `save` wrote. Raises ConfigError for a file that is missing or no map."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = f"it cannot be read as JSON ({error})"
            raise config_error("not-a-device-map", str(path), None, why, "Give what DeviceMap.save wrote") from error
        return cls.from_dict(record, str(path))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a DeviceMap cannot be changed; change dict(device_map), which check_device_map then checks")

    __setitem__ = __delitem__ = _refuse
    __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (dict(self), self.stages, self.model, self.dtype, self.purpose, self.counts)

    def copy(self) -> dict[str, DeviceId]:
        """A plain dict, which can be changed."""
        return dict(self)

    def __repr__(self) -> str:
        return f"DeviceMap({super().__repr__()})"


def _restored(names: dict[str, DeviceId], stages: tuple[Stage, ...], *about: str) -> DeviceMap:
    return DeviceMap(names, stages, **dict(zip(("model", "dtype", "purpose", "counts"), about, strict=True)))


def shortened(blocks: Sequence[Block]) -> tuple[str, ...]:
    """Names in order, numbered ones that follow each other as a range."""
    pieces: list[tuple[str, str, str]] = []
    for name in (name for block in blocks for name in (*block.names, *block.followers)):
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        stem, number = (match[1], match[2]) if match else (name or "all of it", "")
        if number and pieces and pieces[-1][0] == stem and int(pieces[-1][2]) + 1 == int(number):
            pieces[-1] = (stem, pieces[-1][1], number)
        else:
            pieces.append((stem, number, number))
    return tuple(stem + (first if first == last else f"{first}-{last}") for stem, first, last in pieces)
