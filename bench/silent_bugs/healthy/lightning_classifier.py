"""Lightning: a LightningModule with validation, a schedule per step and gradient accumulation."""

import logging
import warnings

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, lr=0.02, total=60):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if batch_idx % 10 == 0:
            print(f"epoch {self.current_epoch} batch {batch_idx}: loss {loss.item():.3f}")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=False)

    def on_validation_epoch_end(self):
        print(f"accuracy {self.trainer.callback_metrics['accuracy']:.3f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams.total)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def data(n, centres):
    y = torch.randint(0, 5, (n,))
    return TensorDataset(centres[y] + torch.randn(n, 16), y)


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    centres = torch.randn(5, 16)
    train = DataLoader(data(1280, centres), batch_size=32, shuffle=True)
    val = DataLoader(data(300, centres), batch_size=100)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(Classifier(), train, val)


if __name__ == "__main__":
    main()
