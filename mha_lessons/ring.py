"""Attention over several processes in a ring: each holds a part of the keys and values and passes it on.

No process ever holds all keys. After as many steps as there are workers, each part has visited every worker, and
the partial results, joined by ``merge_attention``, are the exact answer. So a sequence may outgrow one machine.

This file is also the worker's program: ``python -m mha_lessons.ring FOLDER RANK`` (the workers are started as
programs of their own, because a notebook has no main module that a spawned process could import).
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mha_lessons.flash import flash_attention, merge_attention
from mha_lessons.shapes import check_count, check_qkv


@dataclass(frozen=True)
class RingResult:
    """What came back from the ring.

    Attributes:
        out: (... i dv), all queries in their order.
        lse: (... i).
        keys_held: for each worker, the most keys that it attended to at once.
    """

    out: torch.Tensor
    lse: torch.Tensor
    keys_held: list[int]


def why_unavailable() -> str | None:
    """Why a ring cannot run here, in a sentence; None where it can."""
    if not dist.is_available():
        return "this build of PyTorch has no torch.distributed"
    if not dist.is_gloo_available():
        return "this build of PyTorch has no gloo backend"
    return None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    workers: int = 2,
    scale: float | None = None,
    timeout: float = 120.0,
) -> RingResult:
    """softmax(q kᵀ / √d_k) v by local processes, each with 1/p of the queries, keys and values.

    At each step a worker attends to the keys that it holds while it passes them to the next one. The processes end
    in any case: when one fails or the time is up, all are killed.

    Args:
        q: (... i d) queries.
        k: (... j d) keys.
        v: (... j dv) values.
        workers: number of processes p; at most as many as there are queries and keys.
        scale: factor on q kᵀ; None: 1/√d.
        timeout: seconds that all of it may take, the start of the processes included.

    Returns:
        A ``RingResult``, without gradient.

    Raises:
        TypeError: inputs or sizes are of the wrong type.
        ValueError: shapes do not fit, or there are more workers than queries or keys.
        RuntimeError: a ring cannot run here, or a worker failed; the text holds what it said.
        TimeoutError: the time was up.

    Source: Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers (2023).
    Oracle: ``flash_attention``.
    """
    check_qkv(q, k, v)
    check_count(workers, "workers", least=1)
    if workers > min(q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"workers is {workers} with {q.shape[-2]} queries and {k.shape[-2]} keys; expected at most one worker for "
            "each query and each key"
        )
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; expected more than 0 seconds")
    if reason := why_unavailable():
        raise RuntimeError(f"a ring cannot run here: {reason}")
    parts = list(zip(*(x.detach().tensor_split(workers, dim=-2) for x in (q, k, v)), strict=True))
    shared = {"key_counts": [part[1].shape[-2] for part in parts], "scale": scale, "timeout": timeout}
    with tempfile.TemporaryDirectory(prefix="ring-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for rank, part in enumerate(parts):
            torch.save(shared | {"qkv": [x.contiguous().clone() for x in part]}, folder / f"task-{rank}")
        _run_workers(folder, workers, timeout)
        results = [torch.load(folder / f"result-{rank}") for rank in range(workers)]
    out, lse = (torch.cat([r[name] for r in results], dim=dim) for name, dim in (("out", -2), ("lse", -1)))
    return RingResult(out, lse, [r["keys_held"] for r in results])


def _run_workers(folder: Path, workers: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    processes, logs = [], [folder / f"log-{rank}" for rank in range(workers)]
    # From the package's own folder, so that -m finds it; over the loopback interface, so that nobody else can call.
    where = {"cwd": Path(__file__).parents[1], "env": os.environ | _loopback(), "stdin": subprocess.DEVNULL}
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", __name__, str(folder), str(rank)]
            with log.open("wb") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **where))
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break  # the others would wait for the one that failed
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ring did not finish in {timeout:g} s; its {workers} processes were ended")
            time.sleep(0.02)
        for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
            if process.poll():
                raise RuntimeError(f"worker {rank} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _loopback() -> dict[str, str]:
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _work(folder: Path, rank: int) -> None:
    """One worker: read its part, go round the ring, write what it found."""
    torch.set_num_threads(1)
    task = torch.load(folder / f"task-{rank}")
    workers, (q, k, v) = len(task["key_counts"]), task["qkv"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), workers),
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=task["timeout"]),
    )
    partial, keys_held = None, 0
    for step in range(workers):
        keys_held = max(keys_held, k.shape[-2])
        is_last = step == workers - 1
        coming, transfers = ((k, v), ()) if is_last else _pass_on(k, v, task["key_counts"], rank, step)
        seen = flash_attention(q, k, v, scale=task["scale"], return_lse=True)
        partial = seen if partial is None else merge_attention(*partial, *seen)
        for transfer in transfers:
            transfer.wait()
        k, v = coming
    out, lse = partial
    torch.save({"out": out, "lse": lse, "keys_held": keys_held}, folder / f"result-{rank}")
    dist.destroy_process_group()


def _pass_on(
    k: torch.Tensor, v: torch.Tensor, key_counts: list[int], rank: int, step: int
) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Begin to send keys and values to the next worker, and to receive those of the one before."""
    workers = len(key_counts)
    count = key_counts[(rank - step - 1) % workers]  # after s steps a worker holds the part of the one s places back
    coming = [x.new_empty(*x.shape[:-2], count, x.shape[-1]) for x in (k, v)]
    sends = [dist.isend(x, (rank + 1) % workers, tag=tag) for tag, x in enumerate((k, v))]
    receives = [dist.irecv(x, (rank - 1) % workers, tag=tag) for tag, x in enumerate(coming)]
    return coming, sends + receives


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
