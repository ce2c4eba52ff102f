"""Lightning with manual optimization: a GAN whose two optimizers are toggled."""

import logging
import warnings

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 48), nn.LeakyReLU(0.2), nn.Linear(48, outputs))


class GAN(lightning.LightningModule):
    def __init__(self, latent=4):
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator, self.discriminator = mlp(latent, 2), mlp(2, 1)

    def judge(self, points, real):
        logits = self.discriminator(points)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        g_optimizer, d_optimizer = self.optimizers()
        noise = torch.randn(len(real), self.latent)

        self.toggle_optimizer(g_optimizer)
        g_loss = self.judge(self.generator(noise), True)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)

        self.toggle_optimizer(d_optimizer)
        fake = self.generator(noise).detach()
        d_loss = (self.judge(real, True) + self.judge(fake, False)) / 2
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        if batch_idx % 5 == 0:
            gap = (fake.mean(0) - real.mean(0)).norm().item()
            print(f"batch {batch_idx}: loss G {g_loss:.3f} D {d_loss:.3f}, gap of means {gap:.3f}")

    def configure_optimizers(self):
        g_optimizer = torch.optim.Adam(self.generator.parameters(), lr=5e-3, betas=(0.5, 0.99))
        d_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=5e-3, betas=(0.5, 0.99))
        return [g_optimizer, d_optimizer]


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(0, verbose=False)
    points = torch.randn(1280, 2) * 0.3 + torch.tensor([1.5, -1.0])
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GAN(), DataLoader(TensorDataset(points), batch_size=64, shuffle=True))


if __name__ == "__main__":
    main()
