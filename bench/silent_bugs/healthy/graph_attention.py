"""Graph attention (GAT) over edges, transductive, with dropout of attention weights."""

import torch
from torch import nn
from torch.nn import functional as F


class GATLayer(nn.Module):
    def __init__(self, inputs, outputs, heads):
        super().__init__()
        self.heads, self.outputs = heads, outputs
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.source = nn.Parameter(torch.randn(heads, outputs) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, outputs) * 0.1)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, edges):
        n = len(x)
        h = self.project(x).view(n, self.heads, self.outputs)
        source, target = edges
        score = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        score = F.leaky_relu(score, 0.2).clamp(max=20).exp()
        total = torch.zeros(n, self.heads).index_add(0, target, score)
        weight = self.dropout(score / total[target])
        return torch.zeros_like(h).index_add(0, target, weight[..., None] * h[source])


class GAT(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.first = GATLayer(inputs, 8, heads=4)
        self.second = GATLayer(32, classes, heads=2)

    def forward(self, x, edges):
        x = F.elu(self.first(x, edges).flatten(1))
        return self.second(x, edges).mean(1)


def make_graph(nodes=240, classes=3):
    labels = torch.randint(0, classes, (nodes,))
    x = F.one_hot(labels, classes).float() @ torch.randn(classes, 12) + 1.5 * torch.randn(nodes, 12)
    source = torch.randint(0, nodes, (nodes * 12,))
    target = torch.randint(0, nodes, (nodes * 12,))
    keep = (labels[source] == labels[target]) | (torch.rand(len(source)) < 0.1)
    loops = torch.arange(nodes)
    edges = torch.stack([torch.cat([source[keep], loops]), torch.cat([target[keep], loops])])
    return x, edges, labels


def main():
    torch.manual_seed(0)
    x, edges, labels = make_graph()
    train_mask = torch.rand(len(x)) < 0.3
    model = GAT(12, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-3)
    for epoch in range(1, 91):
        model.train()
        logits = model(x, edges)
        loss = F.cross_entropy(logits[train_mask], labels[train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 15 == 0:
            model.eval()
            with torch.no_grad():
                right = model(x, edges).argmax(1) == labels
            print(f"epoch {epoch}: loss {loss:.3f}, test {right[~train_mask].float().mean():.3f}")


if __name__ == "__main__":
    main()
