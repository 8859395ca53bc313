"""A script of plain torch.distributed for `--raw`, which torchrun runs as well.

It trains a small model under DistributedDataParallel, saves a checkpoint after each step, and resumes from it.
Arguments: a folder for its files, and words. `kill=STEP`: worker 1 kills itself there in the first attempt;
`raise=STEP`: it raises. `backend=NAME`: the name of the backend.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 8


def main(folder: Path, words: dict[str, str]) -> None:
    dist.init_process_group(words.get("backend"))
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    assert (rank, dist.get_world_size()) == (local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(96, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, rows[:, :3].abs().argmax(1))
    loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data))
    done, path = 0, folder / "state.pt"
    if path.exists():
        state = torch.load(path)
        done = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for step, (x, y) in enumerate(loader, start=1):
        if step <= done:
            continue
        if rank == 1 and first and words.get("kill") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and words.get("raise") == str(step):
            raise ArithmeticError("worker 1 cannot go on")
        loss = torch.nn.functional.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / dist.get_world_size():.9f}", flush=True)
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()
    if rank == 0:
        print(f"backend {dist.get_backend()}, restarts {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    del wrapped  # it would be the last to hold the group, whose end under gloo waits for a thread that needs the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:]))
