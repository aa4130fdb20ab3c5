"""A masked autoencoder as MAE trains it.

The rate grows with the batch of all ranks and is set per iteration from the fraction of the epoch.
Losses are averaged over the ranks, and the log has one line of JSON per epoch.
"""

import argparse
import json
import math
import os
import sys

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MaskedAutoencoder(nn.Module):
    """Predict the masked part of each sample from the rest; the mask is drawn in forward."""

    def __init__(self, width=10):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1))
        self.encoder = nn.Sequential(nn.Linear(width, 16), nn.GELU())
        self.decoder = nn.Linear(16, width)

    def forward(self, x, mask_ratio=0.5):
        mask = (torch.rand_like(x) < mask_ratio).float()
        predicted = self.decoder(self.encoder(x * (1 - mask) + self.mask_token * mask))
        return (((predicted - x) ** 2) * mask).sum() / mask.sum().clamp(min=1)


class NativeScaler:
    """The steps of an update in one call: scale, backward, unscale, clip, step."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)

    def __call__(self, loss, optimizer, parameters, update_grad):
        self.scaler.scale(loss).backward()
        if not update_grad:
            return None
        self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm

    def state_dict(self):
        return self.scaler.state_dict()

    def load_state_dict(self, state):
        self.scaler.load_state_dict(state)


def adjust_learning_rate(optimizer, epoch, args):
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        done = (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
        lr = args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


def all_reduce_mean(x):
    reduced = torch.tensor(x)
    dist.all_reduce(reduced)
    return (reduced / dist.get_world_size()).item()


def log_every(data, frequency):
    for number, batch in enumerate(data):
        if number % frequency == 0:
            print(f"batch {number} of {len(data)}", file=sys.stderr)
        yield batch


def train_one_epoch(model, loader, optimizer, epoch, scaler, args):
    model.train()
    losses, norms = [], []
    optimizer.zero_grad()
    for step, (samples,) in enumerate(log_every(loader, 4)):
        if step % args.accum_iter == 0:
            adjust_learning_rate(optimizer, step / len(loader) + epoch, args)
        loss = model(samples)
        if not math.isfinite(loss.item()):
            print(f"loss is {loss.item()}, stopping training")
            sys.exit(1)
        update = (step + 1) % args.accum_iter == 0
        norm = scaler(loss / args.accum_iter, optimizer, model.parameters(), update)
        if update:
            optimizer.zero_grad()
            norms.append(norm.item())
        losses.append(all_reduce_mean(loss.item()))
    return {
        "train_lr": exact(optimizer.param_groups[0]["lr"]),
        "train_loss": exact(sum(losses) / len(losses)),
        "grad_norm": exact(sum(norms) / len(norms)),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--batch_size", type=int, default=4, help="of one rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accum_iter", type=int, default=2)
    parser.add_argument("--blr", type=float, default=0.1)
    parser.add_argument("--warmup_epochs", type=int, default=1)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    args.min_lr = 0.0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    samples = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).cumsum(1) * 0.3
    dataset = TensorDataset(samples)
    sampler = DistributedSampler(
        dataset, num_replicas=dist.get_world_size(), rank=rank, shuffle=True
    )
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    model = MaskedAutoencoder()
    eff_batch_size = args.batch_size * args.accum_iter * dist.get_world_size()
    args.lr = args.blr * eff_batch_size / 256
    print(f"actual lr {exact(args.lr)}, effective batch size {eff_batch_size}")
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    model_without_ddp = model.module
    decay = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05}]
    decay += [{"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.95))
    scaler, start_epoch = NativeScaler(), 0
    if args.resume:
        checkpoint = torch.load(os.path.join(args.out, args.resume), weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        start_epoch = checkpoint["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        stats = train_one_epoch(model, loader, optimizer, epoch, scaler, args)
        if rank == 0:
            state = {
                "model": model_without_ddp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
                "scaler": scaler.state_dict(),
            }
            torch.save(state, os.path.join(args.out, f"checkpoint-{epoch}.pth"))
            with open(os.path.join(args.out, "log.txt"), "a") as file:
                file.write(json.dumps({**stats, "epoch": epoch}) + "\n")
            print(stats)
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
