"""Optimisers without torch.compile, whose tracer takes a second of every start. A run traces nothing."""

from __future__ import annotations

from inspect import unwrap

import torch


class AdamW(torch.optim.AdamW):
    """PyTorch's, whose methods do not import torch.compile's tracer to tell it that it must leave them alone.

    They are PyTorch's own, out of their decorators.
    """

    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    state_dict = unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def import_muon() -> None:
    """Import DeepSpeed's Muon with ``torch.compile`` switched off: it would compile three functions nobody calls.

    Each ZeRO stage imports the module to ask whether the optimiser is a Muon. Ours is an AdamW.
    """
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = compile_function
