"""Ignite: a trainer and an evaluator engine, a schedule and early stopping by handlers."""

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping, LinearCyclicalScheduler
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 16, 5, padding=2)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(16 * 10, 3)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        x = nn.functional.avg_pool1d(x, 3, 3)
        return self.fc(self.dropout(x.flatten(1)))


def signals(n, shapes):
    y = torch.randint(0, 3, (n,))
    return TensorDataset(shapes[y] + 1.0 * torch.randn(n, 2, 30), y)


def main():
    torch.manual_seed(0)
    shapes = torch.randn(3, 2, 30).cumsum(-1) / 4
    train = DataLoader(signals(800, shapes), batch_size=40, shuffle=True)
    val = DataLoader(signals(300, shapes), batch_size=100)
    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(
        model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)}
    )
    cycle = LinearCyclicalScheduler(optimizer, "lr", 1e-3, 8e-3, cycle_size=2 * len(train))
    trainer.add_event_handler(Events.ITERATION_STARTED, cycle)

    @trainer.on(Events.ITERATION_COMPLETED(every=8))
    def show(engine):
        print(f"step {engine.state.iteration}: loss {engine.state.output:.3f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(val)
        result = evaluator.state.metrics
        print(f"epoch {engine.state.epoch}: {result['loss']:.3f}, {result['accuracy']:.3f}")

    stopper = EarlyStopping(3, lambda engine: -engine.state.metrics["loss"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stopper)
    trainer.run(train, max_epochs=4)


if __name__ == "__main__":
    main()
