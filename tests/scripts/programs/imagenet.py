"""A classifier as PyTorch's ImageNet example trains it.

The model is wrapped only if there are several ranks. A StepLR is stepped per epoch. Each rank
validates its share of the samples, then all validate the rest, and meters are reduced.
"""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CLASSES, PIXELS = 3, 12


class AverageMeter:
    """Weighted mean of one figure, over this rank or over all ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, PIXELS, generator=generator)
    return TensorDataset(noise + nn.functional.one_hot(labels, PIXELS) * 2.0, labels)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100.0


def train(loader, model, criterion, optimizer, epoch, rank):
    model.train()
    for i, (image, target) in enumerate(loader):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} epoch {epoch} batch {i}: {exact(loss)} {accuracy(output, target):.3f}")


def validate(loader, model, criterion, args):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")

    def run_validate(batches):
        with torch.no_grad():
            for image, target in batches:
                output = model(image)
                losses.update(criterion(output, target).item(), len(target))
                top1.update(accuracy(output, target), len(target))

    model.eval()
    run_validate(loader)
    if args.distributed:
        losses.all_reduce()
        top1.all_reduce()
        done = len(loader.sampler) * args.world_size
        if done < len(loader.dataset):
            rest = Subset(loader.dataset, range(done, len(loader.dataset)))
            run_validate(DataLoader(rest, batch_size=args.batch_size))
    print(f" * {top1.name} {exact(top1.avg)} {losses.name} {exact(losses.avg)}")
    return top1.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.rank = int(os.environ.get("RANK", "0"))
    args.distributed = args.world_size > 1
    model = nn.Sequential(
        nn.Linear(PIXELS, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)
    )
    if args.distributed:
        dist.init_process_group("gloo", init_method="env://")
        args.batch_size = args.batch_size // args.world_size
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    start_epoch, best_acc1 = 0, 0.0
    if args.resume:
        checkpoint = torch.load(os.path.join(args.out, args.resume), weights_only=True)
        start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train_set, val_set = images(64, seed=1), images(27, seed=2)
    if args.distributed:
        train_sampler = DistributedSampler(train_set)
        val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    else:
        train_sampler = val_sampler = None
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=train_sampler is None, sampler=train_sampler
    )
    val_loader = DataLoader(val_set, args.batch_size, shuffle=False, sampler=val_sampler)
    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args.rank)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        is_best, best_acc1 = acc1 > best_acc1, max(acc1, best_acc1)
        if args.rank == 0:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            latest = os.path.join(args.out, "checkpoint.pth")
            torch.save(state, latest)
            if is_best:
                shutil.copyfile(latest, os.path.join(args.out, "model_best.pth"))
    print(f"rank {args.rank} weights {digest(*model.parameters())}")
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
