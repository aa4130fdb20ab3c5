"""A diffusion model as DiT trains it.

The global batch is divided by the number of ranks, each rank has a seed of its own, rank 0 keeps
the log, an average of the weights is updated after each step, and the loss is reduced now and then.
"""

import argparse
import logging
import os
from collections import OrderedDict
from copy import deepcopy

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Denoiser(nn.Module):
    """A perceptron that is told the time and the class."""

    def __init__(self, width=12, classes=4):
        super().__init__()
        self.classes = nn.Embedding(classes, width)
        self.time = nn.Linear(1, width)
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 6)
        nn.init.zeros_(self.last.weight)

    def forward(self, x, t, y):
        condition = self.time(t[:, None]) + self.classes(y)
        return self.last(torch.nn.functional.silu(self.first(x) + condition))


@torch.no_grad()
def update_ema(ema_model, model, decay):
    averages = OrderedDict(ema_model.named_parameters())
    for name, parameter in OrderedDict(model.named_parameters()).items():
        averages[name].mul_(decay).add_(parameter.data, alpha=1 - decay)


def requires_grad(model, flag):
    for parameter in model.parameters():
        parameter.requires_grad = flag


def create_logger(folder):
    if dist.get_rank() == 0:
        handlers = [logging.StreamHandler(), logging.FileHandler(os.path.join(folder, "log.txt"))]
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers)
        return logging.getLogger(__name__)
    logger = logging.getLogger(__name__)
    logger.addHandler(logging.NullHandler())
    return logger


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert args.global_batch_size % dist.get_world_size() == 0
    rank = dist.get_rank()
    seed = args.global_seed * dist.get_world_size() + rank
    torch.manual_seed(seed)
    if rank == 0:
        os.makedirs(os.path.join(args.out, "000-tiny/checkpoints"), exist_ok=True)
    dist.barrier()
    logger = create_logger(os.path.join(args.out, "000-tiny"))
    logger.info(f"world size {dist.get_world_size()}")
    model = Denoiser()
    ema = deepcopy(model)
    requires_grad(ema, False)
    model = DDP(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(64, 6, generator=generator)
    dataset = TensorDataset(latents, torch.randint(4, (64,), generator=generator))
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.global_seed)
    loader = DataLoader(
        dataset,
        batch_size=int(args.global_batch_size // dist.get_world_size()),
        shuffle=False,
        sampler=sampler,
        drop_last=True,
    )
    update_ema(ema, model.module, decay=0)  # rank 0's weights, which DDP has broadcast
    model.train()
    ema.eval()
    train_steps = log_steps = 0
    running_loss = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logger.info(f"beginning epoch {epoch}")
        for x, y in loader:
            t = torch.rand(len(x))
            noise = torch.randn_like(x)
            noisy = x * (1 - t[:, None]) + noise * t[:, None]
            loss = ((model(noisy, t, y) - noise) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            update_ema(ema, model.module, decay=0.95)
            running_loss += loss.item()
            log_steps += 1
            train_steps += 1
            if train_steps % args.log_every == 0:
                average = torch.tensor(running_loss / log_steps)
                dist.all_reduce(average, op=dist.ReduceOp.SUM)
                average = average.item() / dist.get_world_size()
                logger.info(f"(step={train_steps:07d}) train loss: {exact(average)}")
                running_loss, log_steps = 0.0, 0
            if train_steps % args.ckpt_every == 0:
                if rank == 0:
                    checkpoint = {
                        "model": model.module.state_dict(),
                        "ema": ema.state_dict(),
                        "opt": opt.state_dict(),
                    }
                    path = f"{args.out}/000-tiny/checkpoints/{train_steps:07d}.pt"
                    torch.save(checkpoint, path)
                dist.barrier()
    print(f"rank {rank} weights {digest(model)} ema {digest(ema)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--global-seed", type=int, default=3)
    parser.add_argument("--log-every", type=int, default=3)
    parser.add_argument("--ckpt-every", type=int, default=5)
    main(parser.parse_args())
