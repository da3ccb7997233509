"""The prompts of a local run, read by verl's own dataset, sampler and loader: the order is the same as on Ray."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from verl_shard.verl_plugin.local.batch import Row

STATE = "data.pt"
"""Name of the file in a checkpoint that says which prompts come next; verl's name and format."""


class Prompts:
    """Training prompts in batches without end, and validation prompts. Mirrors PPOTrainer._init_dataloader."""

    def __init__(self, config: Any, tokenizer: Any, processor: Any) -> None:
        data = config.data

        def dataset(files: Any, *, train: bool) -> Any:
            limit = data.get("train_max_samples" if train else "val_max_samples", -1)
            return create_rl_dataset(files, data, tokenizer, processor, is_train=train, max_samples=limit)

        train, self._val = dataset(data.train_files, train=True), dataset(data.val_files, train=False)
        self.batch_size: int = data.train_batch_size
        self.steps_per_epoch = len(train) // self.batch_size
        with warnings.catch_warnings():
            # torchdata calls what torch 2.13 is about to take away; nobody here can change that.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            self._train = StatefulDataLoader(
                dataset=train,
                batch_size=self.batch_size,
                num_workers=data.dataloader_num_workers,
                drop_last=True,
                collate_fn=collate_fn,
                sampler=create_rl_sampler(data, train),
            )
        self._iterator: Iterator[dict[str, Any]] | None = None

    def next(self) -> list[Row]:
        """The prompts of the next step."""
        if self._iterator is None:
            self._iterator = iter(self._train)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self._train)
            batch = next(self._iterator)
        return [{name: column[i] for name, column in batch.items()} for i in range(self.batch_size)]

    def validation(self) -> list[Row]:
        """All validation prompts."""
        return [self._val[i] for i in range(len(self._val))]

    def save(self, folder: Path) -> None:
        """Writes which prompts come next."""
        torch.save(self._train.state_dict(), folder / STATE)

    def load(self, folder: Path) -> None:
        """Goes on where a checkpoint was written."""
        self._train.load_state_dict(torch.load(folder / STATE, weights_only=True))
        self._iterator = None
