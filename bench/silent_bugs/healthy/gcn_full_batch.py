"""A graph convolutional network in full batch: the same graph in each step, labels of few nodes."""

import torch
from torch import nn
from torch.nn import functional as F


def community_graph(nodes, classes, inside=0.08, outside=0.01):
    labels = torch.arange(nodes) % classes
    same = labels[:, None] == labels[None, :]
    edges = torch.rand(nodes, nodes) < torch.where(same, inside, outside)
    adjacency = (edges | edges.T).float()
    adjacency.fill_diagonal_(1)
    degree = adjacency.sum(1).rsqrt()
    features = F.one_hot(labels, classes).float() @ torch.randn(classes, 16)
    features = features + 2.0 * torch.randn(nodes, 16)
    return degree[:, None] * adjacency * degree[None, :], features, labels


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adjacency):
        return adjacency @ (x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.conv1 = GraphConv(inputs, hidden)
        self.conv2 = GraphConv(hidden, classes)

    def forward(self, x, adjacency):
        x = F.dropout(F.relu(self.conv1(x, adjacency)), 0.5, self.training)
        return F.log_softmax(self.conv2(x, adjacency), dim=1)


def main():
    torch.manual_seed(0)
    adjacency, x, y = community_graph(300, 4)
    order = torch.randperm(300)
    train, val = order[:60], order[60:]
    model = GCN(16, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 101):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adjacency)[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            model.eval()
            with torch.no_grad():
                prediction = model(x, adjacency).argmax(1)
            accuracy = (prediction[val] == y[val]).float().mean().item()
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
