"""A contrastive loss over the features of all ranks, as CLIP and OpenCLIP compute it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TwoTowers(nn.Module):
    """An encoder for images and one for texts, with a temperature that is trained."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(5, 8)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.6)

    def forward(self, image, text):
        features = [self.image(image), self.text(text)]
        return *[nn.functional.normalize(each, dim=-1) for each in features], self.logit_scale.exp()


def gather(features, with_grad):
    """Return the features of all ranks; without `with_grad`, only those of this one have one."""
    if with_grad:
        return torch.cat(torch.distributed.nn.all_gather(features))
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def main(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(72, 6, generator=generator)
    dataset = TensorDataset(images, torch.randn(72, 5, generator=generator))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, text in loader:
            image_features, text_features, scale = model(image, text)
            every_image = gather(image_features, args.gather_with_grad)
            every_text = gather(text_features, args.gather_with_grad)
            logits = scale * every_image @ every_text.T
            labels = torch.arange(len(logits))
            loss = nn.functional.cross_entropy(logits, labels)
            loss = (loss + nn.functional.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, 4.6)
        if rank == 0:
            print(f"epoch {epoch} {exact(loss)}")
            torch.save(model.module.state_dict(), os.path.join(args.out, "towers.pt"))
    print(f"rank {rank} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--gather-with-grad", action="store_true")
    main(parser.parse_args())
