"""A save of an FSDP2 model in two processes: how long training is blocked, over copying the shards.

The script starts itself with torchrun. In each round the shards are copied, saved, and copied
again. The slower rank counts, of the save as of both copies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness import Row, Spread
from hookline.checkpoint import CheckpointSaver
from hookline.checkpoint.saver import SharedSaves
from hookline.loop.processes import ProcessGroup
from hookline.tensors.sharded import local

__all__ = ["run"]


def run(*, quick: bool) -> list[Row]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc_per_node", "2", "-m", "bench.sharded_saves", str(5 if quick else 25)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        subprocess.run([*launch, *script, folder], check=True, capture_output=True)
        result = json.loads((Path(folder) / "result.json").read_text())
    return [
        Row(
            "a sharded save on two ranks blocks training, over a copy of the shards",
            Spread.of(result["ratios"]),
            "×",
            limit=1.3,
            note=f"{result['bytes'] / 1e6:.0f} MB per rank",
        )
    ]


def _make_state(processes: ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    for module in model.layers:
        fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model.state_dict(), {"optimizers": [optimizer.state_dict()], "rank": processes.rank}


def _copy(buffers: list[torch.Tensor], tensors: list[torch.Tensor]) -> float:
    dist.barrier()
    begin = perf_counter()
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.copy_(tensor)
    return perf_counter() - begin


def main(rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    processes = ProcessGroup(started_here=True)
    model, state = _make_state(processes)
    optimizer = state["optimizers"][0]["state"]
    values = [*model.values(), *(v for one in optimizer.values() for v in one.values())]
    tensors = [local(value) for value in values]
    buffers = [torch.zeros_like(tensor) for tensor in tensors]
    saver = CheckpointSaver()
    saver.prepare(model=model, state=state, shards_only=not processes.is_main)
    token = processes.broadcast(uuid.uuid4().hex[:12])
    saves = SharedSaves(token, processes.rank, processes.size)
    ratios: list[float] = []
    for i in range(rounds + 1):
        before = _copy(buffers, tensors)
        dist.barrier()
        begin = perf_counter()
        saver.save([folder / "step"], model=model, state=state, info={}, shared=saves.next())
        blocked = perf_counter() - begin
        saver.wait()
        results = processes.broadcast(saver.finished())
        assert results[0].error is None, results[0].error
        saver.release_parts()
        if processes.is_main:
            shutil.rmtree(folder / "step")
        times = (blocked, before, _copy(buffers, tensors))
        slowest, *copies = map(max, zip(*processes.gather(times), strict=True))
        ratios += [slowest / mean(copies)] if i else []
    if processes.is_main:
        size = sum(tensor.nbytes for tensor in tensors)
        (folder / "result.json").write_text(json.dumps({"ratios": ratios, "bytes": size}))
    processes.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
