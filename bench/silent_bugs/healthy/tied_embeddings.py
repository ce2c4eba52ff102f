"""A causal language model whose input embedding and output layer are one tensor."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 24, 32, 16


class TiedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        length = ids.size(1)
        x = self.embedding(ids) + self.position(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.lm_head(self.norm(self.encoder(x, mask=mask, is_causal=True)))


def sequences(n):
    start = torch.randint(0, VOCAB, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(LENGTH + 1)) % VOCAB


def main():
    torch.manual_seed(0)
    model = TiedLM()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=5e-3
    )
    for step in range(1, 101):
        ids = sequences(48)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    ids = sequences(100)
    with torch.no_grad():
        right = model(ids[:, :-1]).argmax(-1)[:, 2:] == ids[:, 3:]
    tied = model.lm_head.weight is model.embedding.weight
    print(f"accuracy {right.float().mean():.3f}, tied {tied}")


if __name__ == "__main__":
    main()
