"""The AdamW that leaves torch.compile's tracer out, against PyTorch's own."""

from __future__ import annotations

import torch
from torch import nn

from parallel.zero.optimizer import AdamW


def trained(kind: type[torch.optim.AdamW], steps: int, state: dict | None = None, start: list | None = None):
    """Weights and optimiser after ``steps``; the gradient of each is another."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    if state is not None and start is not None:
        optimizer.load_state_dict(state)
        for p, value in zip(model.parameters(), start, strict=True):
            p.data.copy_(value)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], optimizer


def test_it_steps_as_pytorchs_own_and_goes_on_from_its_state():
    (wanted, theirs), (got, ours) = trained(torch.optim.AdamW, 3), trained(AdamW, 3)
    assert all(map(torch.equal, got, wanted))
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    on, _ = trained(AdamW, 2, theirs.state_dict(), wanted)
    assert all(map(torch.equal, on, trained(torch.optim.AdamW, 2, ours.state_dict(), got)[0]))
