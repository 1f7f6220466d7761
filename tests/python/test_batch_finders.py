# SPDX-License-Identifier: BSD-3-Clause
"""Others' searches for a batch size know gpumemx's error by its type and its words.

Each needs its package, which gpumemx does not: pip install accelerate pytorch-lightning.
"""

import pytest
from torch_tools import simulated

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("adapter")]


def test_accelerate_finds_a_size() -> None:
    pytest.importorskip("accelerate")
    assert (
        simulated(
            """
            from accelerate.utils import find_executable_batch_size
            tried = []
            @find_executable_batch_size(starting_batch_size=128)
            def train(batch_size):
                tried.append(batch_size)
                blocks = []
                try:
                    for _ in range(batch_size):
                        blocks.append(alloc(100 * MIB))
                finally:
                    for block in blocks: free(block)
                return batch_size
            size = train()
            assert size == tried[-1] <= 81 and tried[-2] > 81, tried
            print("found", size)
            """,
            ACCELERATE_USE_CPU="true",
        )
        == "found 73\n"
    )


def test_lightning_finds_a_size() -> None:
    pytest.importorskip("pytorch_lightning")
    assert (
        simulated(
            """
            import logging, warnings
            warnings.simplefilter("ignore")
            import pytorch_lightning as pl
            from pytorch_lightning.tuner import Tuner
            for name in ("pytorch_lightning", "lightning", "lightning.pytorch"):
                logging.getLogger(name).setLevel(logging.ERROR)

            class Model(pl.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.batch_size = 2
                    self.layer = torch.nn.Linear(4, 1)
                def train_dataloader(self):
                    return torch.utils.data.DataLoader(torch.randn(4096, 4), self.batch_size)
                def training_step(self, batch, index):
                    free(alloc(100 * MIB * len(batch)))
                    return self.layer(batch).sum()
                def configure_optimizers(self):
                    return torch.optim.SGD(self.parameters(), lr=0.1)

            model = Model()
            import tempfile
            with tempfile.TemporaryDirectory() as folder:
                trainer = pl.Trainer(
                    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder)
                size = Tuner(trainer).scale_batch_size(
                    model, mode="binsearch", steps_per_trial=1, margin=0.0)
            print("found", size)
            """
        )
        == "found 81\n"
    )
