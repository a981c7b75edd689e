"""Expert layers of known models on one GPU: rates compared with dense matmuls, memory, time by operation, errors.

    python -m benchmarks.gpu_moe [--minutes 4.5] [--output FILE.json]

Needs only PyTorch and a CUDA device. Three tables, also saved as JSON:

1. One layer of Mixtral-8x7B, Qwen3-30B-A3B and DeepSeek-V3 (its shared expert included), 16K to 128K tokens, bfloat16,
   forward and backward, including the router. TFLOP/s count the experts' matmuls alone. Dense is the same FLOPs in the
   matmuls of one FFN that is as wide as a token's experts together. ``share`` is the layer's rate over the dense one,
   both directions together: goals 0.85 for Mixtral, 0.65 for the others. Tokens and router are random: ``load`` is the
   most loaded expert over the mean. ``peak`` is GiB beyond the weights, including gradients. If a layer does not fit,
   it is measured again in tiles of tokens.
2. The operations that take most of a step's time.
3. Relative (Frobenius) errors of the experts in bfloat16 against a float64 loop, and the largest gradient of an expert
   that no token chose, which must be 0.

``--device cpu --tiny`` runs the same code on the CPU at tiny sizes, to check the script without measuring.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import gpu
from benchmarks.gpu import Stopwatch, peak_bytes, quickest, show
from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher
from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall

TILE_TOKENS = 16_384
"""Tokens per tile, for a layer that does not fit at once."""
_GIB = 2**30


@dataclass(frozen=True)
class Model:
    """An expert layer, and the minimum fraction of the dense rate."""

    name: str
    config: ModelConfig
    goal: float

    @property
    def active_width(self) -> int:
        """FFN channels that one token passes through."""
        return self.config.experts_per_token * self.config.expert_ffn_size + self.config.shared_ffn_size

    def flops(self, tokens: int) -> float:
        """Return the FLOPs of the experts' matmuls, forward; backward takes twice that."""
        return 6.0 * tokens * self.config.hidden_size * self.active_width


MIXTRAL = ModelConfig(hidden_size=4096, num_experts=8, experts_per_token=2, expert_ffn_size=14_336)
QWEN3 = ModelConfig(hidden_size=2048, num_experts=128, experts_per_token=8, expert_ffn_size=768)
DEEPSEEK_V3 = ModelConfig(
    hidden_size=7168,
    num_experts=256,
    experts_per_token=8,
    expert_ffn_size=2048,
    shared_ffn_size=2048,
    shared_gate=False,
    score_function="sigmoid",
    selection_bias=True,
    expert_groups=8,
    groups_per_token=4,
    routed_scale=2.5,
)
MODELS = (
    Model("Mixtral-8x7B", MIXTRAL, 0.85),
    Model("Qwen3-30B-A3B", QWEN3, 0.65),
    Model("DeepSeek-V3", DEEPSEEK_V3, 0.65),
)


@dataclass(frozen=True)
class Setting:
    """Measurements and their device."""

    device: torch.device
    models: tuple[Model, ...]
    tokens: tuple[int, ...]
    rounds: int
    dtype: torch.dtype = torch.bfloat16

    def random(self, *size: int, std: float = 1.0) -> Tensor:
        """Return normal random numbers in the setting's dtype."""
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(std=std)


def full_setting() -> Setting:
    """Return the setting that the module docstring describes."""
    return Setting(torch.device("cuda"), MODELS, tuple(1024 * 2**n for n in range(4, 8)), 5)


def tiny_setting(device: str) -> Setting:
    """Return a setting that measures everything once, in seconds on a CPU."""
    models = tuple(replace(model, config=tiny(model.config)) for model in MODELS)
    return Setting(torch.device(device), models, (64, 96), 1)


def tiny(config: ModelConfig) -> ModelConfig:
    """Return the same kind of layer with 32 channels, experts of 16 and no more than 16 of them."""
    experts = min(config.num_experts, 16)
    shared = 16 if config.shared_ffn_size else 0
    chosen = min(config.experts_per_token, 4)
    return replace(
        config,
        hidden_size=32,
        num_experts=experts,
        experts_per_token=chosen,
        expert_ffn_size=16,
        shared_ffn_size=shared,
    )


# --- measuring ----------------------------------------------------------------------------------------------


def build_layer(setting: Setting, config: ModelConfig) -> MixtureOfExperts:
    """Build a layer with random weights in its final dtype and place: in float32 it might not fit."""
    with torch.device("meta"):
        layer = MixtureOfExperts(config).to(setting.dtype)
    layer.to_empty(device=setting.device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        for buffer in layer.buffers():
            buffer.zero_()
    return layer


def one_document(x_NM: Tensor, run: ExpertRun) -> MoECall:
    """Return the layer's arguments for tokens that are one document."""
    documents_Bt = torch.zeros(1, len(x_NM), dtype=torch.long, device=x_NM.device)
    return MoECall(run=run, documents_Bt=documents_Bt, num_documents=1)


def layer_step(layer: nn.Module, x_NM: Tensor, dout_NM: Tensor, run: ExpertRun, watch: Stopwatch) -> None:
    """Run forward and backward of a layer whose tokens are one document, without earlier gradients."""
    layer.zero_grad(set_to_none=True)
    x_BtM = x_NM.detach().unsqueeze(0).requires_grad_()
    call = one_document(x_NM, run)
    watch.mark()
    out_BtM = layer(x_BtM, call)[0]
    watch.mark()
    out_BtM.backward(dout_NM.view_as(out_BtM))
    watch.mark()


def dense_seconds(setting: Setting, model: Model, tokens: int) -> tuple[float, float]:
    """Measure the same FLOPs in the dense matmuls of one FFN, forward and backward."""
    M, F = model.config.hidden_size, model.active_width
    x, dy, h, dgate_up = (setting.random(tokens, width) for width in (M, M, F, 2 * F))
    gate_up, down = setting.random(2 * F, M), setting.random(M, F)

    def run(watch: Stopwatch) -> None:
        watch.mark()
        for a, b in ((x, gate_up.T), (h, down.T)):
            torch.mm(a, b)
        watch.mark()
        for a, b in ((dy, down), (dy.T, h), (dgate_up, gate_up), (dgate_up.T, x)):
            torch.mm(a, b)
        watch.mark()

    forward, backward = quickest(run, setting)
    return forward, backward


def measure_model(setting: Setting, model: Model, deadline: float) -> Iterator[dict[str, Any]]:
    """Return a row per token count; without rates if the layer does not fit."""
    dense = {tokens: fitting(lambda n=tokens: dense_seconds(setting, model, n)) for tokens in setting.tokens}
    layer = build_layer(setting, model.config)
    for tokens in setting.tokens:
        for tile_tokens in (0, TILE_TOKENS):
            if time.monotonic() > deadline:
                print(f"out of time before {model.name} at {tokens} tokens", file=sys.stderr)
                return
            row = {"model": model.name, "tokens": tokens, "tile": tile_tokens}
            run = ExpertRun(TokenDispatcher(), tile_tokens, "all" if tile_tokens else "activation")
            measured = fitting(lambda n=tokens, r=run: measure_layer(setting, layer, n, r))
            yield row | (rates(model, tokens, measured, dense[tokens]))
            if measured is not None:
                break


@dataclass(frozen=True)
class Measured:
    """Measurements of one layer's step."""

    forward_s: float
    backward_s: float
    peak_gib: float | None
    load: float


def measure_layer(setting: Setting, layer: MixtureOfExperts, tokens: int, run: ExpertRun) -> Measured:
    """Measure a layer's time, memory and load on random tokens."""
    torch.manual_seed(0)
    x, dout = (setting.random(tokens, layer.experts.gate_up_proj.shape[-1]) for _ in range(2))
    forward, backward = quickest(lambda watch: layer_step(layer, x, dout, run, watch), setting)
    layer.zero_grad(set_to_none=True)
    peak = peak_bytes(lambda: layer_step(layer, x, dout, run, Stopwatch(setting.device)), setting.device)
    with torch.no_grad():
        counts_SE = layer(x.unsqueeze(0), one_document(x, run))[1]
    load = (counts_SE.max() / counts_SE.double().mean()).item()
    return Measured(forward, backward, None if peak is None else peak / _GIB, load)


def fitting(run: Callable[[], Any]) -> Any:
    """Return ``run``'s result; None if the GPU's memory does not suffice."""
    try:
        return run()
    except torch.OutOfMemoryError:
        pass
    gc.collect()
    torch.cuda.empty_cache()
    return None


def rates(
    model: Model, tokens: int, measured: Measured | None, dense: tuple[float, float] | None
) -> dict[str, float | None]:
    """Return TFLOP/s for a layer and for dense matmuls, given their (forward, backward) seconds."""
    work = model.flops(tokens) / 1e12
    names = ("forward_tflops", "backward_tflops", "dense_forward", "dense_backward", "share")
    row: dict[str, float | None] = dict.fromkeys(names)
    if measured is not None:
        row |= {"forward_tflops": work / measured.forward_s, "backward_tflops": 2 * work / measured.backward_s}
    if dense is not None:
        row |= {"dense_forward": work / dense[0], "dense_backward": 2 * work / dense[1]}
    if measured is not None and dense is not None:
        row["share"] = sum(dense) / (measured.forward_s + measured.backward_s)
    peak, load = (None, None) if measured is None else (measured.peak_gib, measured.load)
    return {**row, "goal": model.goal, "peak_gib": peak, "load": load}


# --- where the time goes, and errors ------------------------------------------------------------------------


def measure_parts(setting: Setting, model: Model, most: int = 8) -> Iterator[dict[str, Any]]:
    """Return the operations that take most of a step at the smallest token count."""
    from torch.profiler import ProfilerActivity, profile

    layer = build_layer(setting, model.config)
    x, dout = (setting.random(setting.tokens[0], model.config.hidden_size) for _ in range(2))
    run, on_gpu = ExpertRun(), setting.device.type == "cuda"
    layer_step(layer, x, dout, run, Stopwatch(setting.device))
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        layer_step(layer, x, dout, run, Stopwatch(setting.device))
        if on_gpu:
            torch.cuda.synchronize()
    events = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e) for e in found.key_averages()]
    total = sum(micros for micros, _ in events) or 1.0
    for micros, event in sorted(events, key=lambda of: -of[0])[:most]:
        yield {"model": model.name, "ms": micros / 1e3, "share": micros / total, "calls": event.count,
               "operation": event.key[:70]}  # fmt: skip


def looped(x: Tensor, gates_Nk: Tensor, experts_Nk: Tensor, gate_up_EFM: Tensor, down_EMF: Tensor) -> Tensor:
    """Compute Σ gate · expert(x), expert by expert."""
    out = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(gate_up_EFM.unbind(), down_EMF.unbind(), strict=True)):
        token, choice = torch.where(experts_Nk == expert)
        gate, up = (x[token] @ gate_up.T).chunk(2, dim=-1)
        y = (nn.functional.silu(gate) * up) @ down.T
        out = out.index_add(0, token, gates_Nk[token, choice, None] * y)
    return out


def measure_errors(setting: Setting, model: Model, tokens: int = 256) -> dict[str, Any]:
    """Measure errors of output and gradients, in a smaller layer whose first expert no token chose."""
    config = replace(tiny(model.config), hidden_size=128, expert_ffn_size=64)
    layer = build_layer(setting, config)
    x, dout = (setting.random(tokens, config.hidden_size) for _ in range(2))
    experts = torch.rand(tokens, config.num_experts - 1, device=setting.device)
    experts_Nk = 1 + experts.argsort(1)[:, : config.experts_per_token]
    gates_Nk = torch.rand(experts_Nk.shape, device=setting.device, dtype=accumulate_dtype(setting.dtype))
    weights = (layer.experts.gate_up_proj, layer.experts.down_proj)
    leaves = [of.detach().requires_grad_() for of in (x, gates_Nk)]
    out = layer.experts(leaves[0], leaves[1], experts_Nk, ExpertRun())
    out.backward(dout.to(out.dtype))
    exact = [of.detach().double().requires_grad_() for of in (x, gates_Nk, *weights)]
    want = looped(exact[0], exact[1], experts_Nk, *exact[2:])
    want.backward(dout.double())
    pairs = zip(("dx", "dgates", "dgate_up", "ddown"), (*leaves, *weights), exact, strict=True)
    errors = {"out": _relative(out, want)} | {name: _relative(a.grad, b.grad) for name, a, b in pairs}
    unchosen = max(w.grad[0].abs().max().item() for w in weights if w.grad is not None)
    return {"model": model.name, **errors, "unchosen": unchosen}


def _relative(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None
    assert want is not None
    return ((got.double() - want).norm() / want.norm()).item()


# --- the report ---------------------------------------------------------------------------------------------


def run(setting: Setting, minutes: float) -> dict[str, Any]:
    """Measure all tables, print each as it is complete, and return them."""
    begun = time.monotonic()
    layers: list[dict[str, Any]] = []
    for model in setting.models:
        rows = list(measure_model(setting, model, begun + 60 * minutes * 0.9))
        show(f"{model.name}: TFLOP/s (goal {model.goal} of the dense products'), GiB beyond the weights", rows)
        layers += rows
        _free()
    parts = []
    for model in setting.models:
        parts += fitting(lambda m=model: list(measure_parts(setting, m))) or []
        _free()
    show(f"What takes the time at {setting.tokens[0]} tokens", parts)
    errors = [measure_errors(setting, model) for model in setting.models]
    show("Relative errors against float64; largest gradient of an expert without tokens", errors)
    return {"layers": layers, "parts": parts, "errors": errors}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def behind(result: dict[str, Any]) -> list[str]:
    """Return the layers' missed goals: a model's best row counts, because small ones cannot fill a GPU."""
    found = []
    for name in dict.fromkeys(row["model"] for row in result["layers"]):
        rows = [row for row in result["layers"] if row["model"] == name and row["share"] is not None]
        best = max((row["share"] for row in rows), default=0.0)
        goal = next(row["goal"] for row in result["layers"] if row["model"] == name)
        if best < goal:
            found.append(f"{name}: {best:.2f} < {goal} of the dense rate")
    return found + [f"{row['model']}: an expert without tokens has a gradient" for row in result["errors"]
                    if row["unchosen"] != 0]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 without a device or if a goal is missed."""
    return gpu.main(
        "gpu_moe",
        __doc__,
        full=full_setting,
        tiny=tiny_setting,
        run=run,
        behind=behind,
        minutes=4.5,
        arguments=arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
