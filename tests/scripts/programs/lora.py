"""Low-rank adapters as PEFT has them: a frozen base, adapters in its layers, merged at last."""

import argparse

import torch
import torch.distributed as dist
from figures import digest, exact
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Adapted(nn.Module):
    """A linear layer whose weights stay, with a product of two small matrices beside it."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scaling = base, alpha / rank
        self.dropout = nn.Dropout(0.05)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=5**0.5)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(self.dropout(x))) * self.scaling

    def merged(self):
        layer = nn.Linear(self.base.in_features, self.base.out_features)
        with torch.no_grad():
            change = self.lora_b.weight @ self.lora_a.weight * self.scaling
            layer.weight.copy_(self.base.weight + change)
            layer.bias.copy_(self.base.bias)
        return layer


def adapt(model, rank=2, alpha=4):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, Adapted(child, rank, alpha))
    model[-1].base.bias.requires_grad_(True)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = adapt(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(x, x.pow(2).sum(1, keepdim=True))
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    ddp = DDP(model)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(ddp(batch), target)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        print(f"rank {rank} epoch {epoch}: loss {exact(mean)}")
    adapters = {k: v for k, v in model.state_dict().items() if "lora_" in k}
    if rank == 0:
        torch.save(adapters, f"{args.out}/adapter.pt")
    model[0], model[2] = model[0].merged(), model[2].merged()
    print(f"rank {rank} adapters {len(adapters)} weights {digest(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
