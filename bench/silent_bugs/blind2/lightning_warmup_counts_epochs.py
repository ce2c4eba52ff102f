"""A warm-up written in steps, returned to Lightning without `interval`: it moves once an epoch."""

import logging
import sys
import warnings

import lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
WARMUP_STEPS, EPOCHS = 16, 4


class Regressor(pl.LightningModule):
    def __init__(self, total_steps):
        super().__init__()
        self.total_steps = total_steps
        self.net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1))
        self.rates = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return F.mse_loss(self.net(x).squeeze(-1), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

        def factor(step):
            if step < WARMUP_STEPS:
                return (step + 1) / WARMUP_STEPS
            return max(0.0, (self.total_steps - step) / (self.total_steps - WARMUP_STEPS))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        config = {"scheduler": scheduler}
        if FIXED:
            config["interval"] = "step"
        return {"optimizer": optimizer, "lr_scheduler": config}


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    pl.seed_everything(0, verbose=False)
    x = torch.randn(768, 12)
    y = (x @ torch.randn(12)).tanh() * 2
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = Regressor(EPOCHS * len(loader))
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    with torch.no_grad():
        loss = F.mse_loss(model.net(x).squeeze(-1), y).item()
    print(f"final loss {loss:.4f}")
    print(f"evidence: largest learning rate {max(model.rates):.5f} of 0.01")


if __name__ == "__main__":
    main()
