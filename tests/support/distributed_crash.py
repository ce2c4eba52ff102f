"""Run by `torchrun`: somebody's training script, in which one rank fails. Usage: KIND FOLDER."""

import sys

import torch
import torch.distributed as dist
from distributed_loops import batches, make

import hookline


class Watch(hookline.Hook):
    def on_exception(self, exception: BaseException) -> None:
        print(f"rank {dist.get_rank()} has seen {exception!r}", flush=True)


dist.init_process_group("gloo")
model = make(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hookline.attach(model, optimizer, hooks=[Watch()], runs=sys.argv[2]) as session:
    for step, batch in enumerate(batches(dist.get_rank())):
        if dist.get_rank() == 1 and step == 3:
            raise ValueError("the data of rank 1 is damaged")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
