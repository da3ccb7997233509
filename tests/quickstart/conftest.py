"""One small data set and one untrained model for all tests here."""

from pathlib import Path

import pytest

from verl_shard.config.data_files import DataFiles
from verl_shard.quickstart.model import make_model
from verl_shard.training.data_of_tasks import write_data

SEED = 3


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    return write_data(tmp_path_factory.mktemp("data"), seed=SEED, n_train=600, n_val=60)


@pytest.fixture(scope="session")
def model_dir(data: DataFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", data, seed=SEED)
