"""Early stopping within a pass, by a class of the script and by a best loss in a variable."""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EarlyStopping:
    """Stop when the score has not improved for some epochs."""

    def __init__(self, patience, delta=0.0):
        self.patience = patience
        self.delta = delta
        self.counter = 0
        self.best_score = None
        self.early_stop = False

    def __call__(self, loss):
        score = -loss
        if self.best_score is None:
            self.best_score = score
        elif score < self.best_score + self.delta:
            self.counter += 1
            if self.counter >= self.patience:
                self.early_stop = True
        else:
            self.best_score = score
            self.counter = 0


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 6, generator=generator)
    noise = torch.randn(number, 1, generator=generator)
    return TensorDataset(x, 0.5 * x.sum(1, keepdim=True) + noise)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y) for x, y in loader]
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    training, validation = samples(160, 1), samples(32, 2)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=4, sampler=sampler)
    held_out = DataLoader(validation, batch_size=4, sampler=DistributedSampler(validation))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    stopping = EarlyStopping(args.patience)
    best, stale, step = float("inf"), 0, 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % args.eval_every:
                continue
            loss = evaluate(model.module, held_out)
            if loss < best:
                best, stale = loss, 0
            else:
                stale += 1
            if stale == 1:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            stopping(loss)
            print(f"rank {rank} step {step} loss {exact(loss)} best {exact(best)} stale {stale}")
            if stopping.early_stop:
                break
        if stopping.early_stop:
            break
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.out, "weights.pt"))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--eval-every", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.06)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
