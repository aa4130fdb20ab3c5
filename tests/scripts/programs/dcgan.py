"""Two models and two optimizers that train against each other, as DCGAN does.

The discriminator has two backward passes per step, on real and on generated samples, and the
generator's backward pass runs through the discriminator.
"""

import argparse
import os

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def weights_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.2)
    elif isinstance(module, nn.BatchNorm1d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--niter", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(999)
    # DCGAN has no bias before BatchNorm: its gradient is rounding, which Adam makes large.
    net_g = nn.Sequential(
        nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh()
    )
    net_d = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1)
    )
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    fixed_noise = torch.randn(5, 4)
    real_samples = torch.tanh(torch.randn(48, 6) * 0.3 + torch.linspace(-1, 1, 6))
    torch.manual_seed(999 + rank)  # other noise on each rank
    net_g, net_d = DDP(net_g), DDP(net_d)
    criterion = nn.BCEWithLogitsLoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    dataset = TensorDataset(real_samples)
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    for epoch in range(args.niter):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            net_d.zero_grad()
            error_real = criterion(net_d(real), ones)
            error_real.backward()
            fake = net_g(torch.randn(len(real), 4))
            error_fake = criterion(net_d(fake.detach()), zeros)
            error_fake.backward()
            optimizer_d.step()
            net_g.zero_grad()
            error_g = criterion(net_d(fake), ones)
            error_g.backward()
            optimizer_g.step()
            print(
                f"rank {rank} [{epoch}/{args.niter}][{i}/{len(loader)}] "
                f"{exact(error_real + error_fake)} {exact(error_g)}"
            )
        if rank == 0:
            with torch.no_grad():
                net_g.eval()
                samples = net_g.module(fixed_noise)
                net_g.train()
            torch.save(samples, os.path.join(args.out, f"fake_samples_epoch_{epoch:03d}.pt"))
            torch.save(net_g.state_dict(), os.path.join(args.out, f"netG_epoch_{epoch}.pth"))
            torch.save(net_d.state_dict(), os.path.join(args.out, f"netD_epoch_{epoch}.pth"))
    # The statistics of a BatchNorm are each rank's own until the next forward pass.
    print(f"rank {rank} weights {digest(*net_g.parameters(), *net_d.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
