"""Traces of tiny models beside sums by hand, and of a ring beside its schedule."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.config.load_config import load_run_config
from launcher.plan.synthetic_documents import synthetic_batch
from launcher.trace.link_traffic import BETWEEN, WITHIN
from longctx.architecture.size import count_parameters
from longctx.conversion.tensor_layouts import quantized_layouts
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.head_split import AttentionShape
from tests.fake_cuda.process import json_on_fake_cuda

pytestmark = pytest.mark.timeout(600)
M, HEADS, KV_HEADS, HEAD, T = 64, 4, 2, 16, 256
DENSE = {
    "model.preset": "none",
    "model.vocab_size": 128,
    "model.hidden_size": M,
    "model.num_heads": HEADS,
    "model.num_kv_heads": KV_HEADS,
    "model.head_dim": HEAD,
    "model.ffn_size": 96,
    "data.seq_len": T,
    "train.tokens_per_step": T,
    "parallel.context": 1,
    "train.keep": "attention",
    "zero.stage": 1,
}
EXPERTS = {**DENSE, "model.num_experts": 8, "model.experts_per_token": 2, "model.expert_ffn_size": 32}
ADAPTED = {"model__num_layers": 3, "model__adapter__rank": 2, "train__lr": 1e-4}
ONE, TWO_NODES = {"ranks": 1, "ranks_per_node": 1}, {"ranks": 4, "ranks_per_node": 2}
DOCUMENTS = 300
"""Length of the packed documents of a ring's row of 1,024 tokens: none ends where a rank's tokens do."""


def flags(values: dict[str, Any], **changes: Any) -> list[str]:
    settings = values | {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in (f"--{name}", f"{value}")]


def ring(transport: str, **changes: Any) -> list[str]:
    sizes = {"data__seq_len": 4 * T, "train__tokens_per_step": 4 * T}
    options = {"parallel__context": 4, "parallel__transport": transport, "parallel__layout": "zigzag"}
    return flags(DENSE, **{"model__num_layers": 2, **sizes, **options, **changes})


CASES: dict[str, dict[str, Any]] = {
    "2 layers": {"flags": flags(DENSE, model__num_layers=2), "world": ONE, "rank": 0},
    "3 layers": {"flags": flags(DENSE, model__num_layers=3), "world": ONE, "rank": 0},
    "adapters": {"flags": flags(EXPERTS, **ADAPTED), "world": ONE, "rank": 0},
    "adapters in 4 bits": {
        "flags": flags(EXPERTS, **ADAPTED, model__adapter__quantize_base="nf4"),
        "world": ONE,
        "rank": 0,
    },
    "inputs": {"flags": flags(DENSE, model__num_layers=3, train__keep="inputs"), "world": ONE, "rank": 0},
    "on host": {"flags": ring("p2p", model__num_layers=3, train__store="host"), "world": TWO_NODES, "rank": 1},
    "experts on host": {
        "flags": flags(EXPERTS, model__num_layers=3, train__keep="all", train__store="host"),
        "world": ONE,
        "rank": 0,
    },
    "planted": {"flags": flags(DENSE, model__num_layers=1), "world": ONE, "rank": 0, "plant": True},
    "p2p": {"flags": ring("p2p"), "world": TWO_NODES, "rank": 1, "document_tokens": DOCUMENTS},
    "two_level": {"flags": ring("auto"), "world": TWO_NODES, "rank": 1, "document_tokens": DOCUMENTS},
    "experts": {"flags": flags(EXPERTS, model__num_layers=2), "world": ONE, "rank": 0},
    "experts of 4": {
        "flags": flags(EXPERTS, model__num_layers=2, parallel__expert=4, train__tokens_per_step=4 * T),
        "world": TWO_NODES,
        "rank": 3,
    },
}

SPARSE = {"model.window": 32, "model.sparse_stride": 16}
WAITED = {
    "sparse layers": [*ring("p2p"), "--model.layers", "sparse", "full", *flags(SPARSE)],
    "linear layers": [*ring("p2p"), "--model.layers", "linear", "full"],
    "striped rows": ring("p2p", parallel__layout="striped"),
    "uneven heads": ring("p2p", parallel__ulysses=4, model__num_heads=12, model__num_kv_heads=3),
    "dropout": ring("p2p", model__residual_dropout=0.1),
    "capacity": [
        *ring("p2p"),
        *flags({"model.num_experts": 8, "model.experts_per_token": 2}),
        *flags({"model.expert_ffn_size": 32, "model.capacity_factor": 1.5}),
    ],
}
"""Runs of which each has a part that made the host wait, once a layer, hop or pass."""
MENDED = {
    name: {"flags": words, "world": TWO_NODES, "rank": 1, "document_tokens": DOCUMENTS}
    for name, words in WAITED.items()
}


@pytest.fixture(scope="module")
def traces(cuda_python) -> dict[str, dict[str, Any]]:
    """Every case, traced once by one process under the CUDA build."""
    return traced(cuda_python, CASES)


@pytest.fixture(scope="module")
def mended(cuda_python) -> dict[str, dict[str, Any]]:
    return traced(cuda_python, MENDED)


def traced(python: str, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """These cases, each in a process that the first one forks."""
    found = json_on_fake_cuda(python, "tests.launcher.trace.traces", json.dumps(list(cases.values())))
    return dict(zip(cases, found, strict=True))


@pytest.fixture(scope="module")
def programs(cuda_python) -> dict[str, Any]:
    return json_on_fake_cuda(cuda_python, "tests.launcher.trace.programs")


KIB = 1024


def test_live_bytes_of_a_known_program(programs):
    assert programs["live_bytes"] == {
        "before": 2 * KIB,
        "view holds": 3 * KIB,
        "view gone": 2 * KIB,
        "after": 4 * KIB,
        "end": 0,
        "peak": 4 * KIB,
        "peak at": "aten::zeros",
    }


def test_every_way_to_wait_is_found_and_nothing_else(programs):
    for name, found in programs["waits"].items():
        assert len(found) == (not name.startswith("none")), f"{name}: {found}"


def test_a_layer_keeps_what_recomputation_needs_and_nothing_else(traces):
    two, three = traces["2 layers"], traces["3 layers"]
    # Its input and attention's output in bfloat16, and a float64 log-sum-exp for each head.
    assert three["bytes"]["kept"] - two["bytes"]["kept"] == T * (2 * M + 2 * HEADS * HEAD + 8 * HEADS)
    assert three["bytes"]["passing"] == two["bytes"]["passing"], "one layer is recomputed at a time"


@pytest.mark.parametrize("name", ["2 layers", "3 layers", "experts"])
def test_weights_gradients_and_optimizer_are_those_of_the_parameters(name, traces):
    count = sum(count_parameters(load_run_config(CASES[name]["flags"]).model.config()).values())
    held = traces[name]["bytes"]
    assert (held["weights"], held["gradients"], held["optimizer"]) == (2 * count, 4 * count, 12 * count)


def test_a_quantized_base_takes_its_bits_and_no_wait(traces):
    plain, own = (traces[name] for name in ("adapters", "adapters in 4 bits"))
    layouts = quantized_layouts(load_run_config(CASES["adapters in 4 bits"]["flags"]).model.config()).values()
    saved = sum(2 * layout.numel - layout.num_bytes for layout in layouts)
    assert plain["bytes"]["weights"] - own["bytes"]["weights"] == saved
    assert own["bytes"]["kept"] == plain["bytes"]["kept"]
    assert not own["host_waits"]


def test_inputs_alone_are_kept_without_attentions_result(traces):
    inputs, attention = (traces[name]["bytes"] for name in ("inputs", "3 layers"))
    assert attention["kept"] - inputs["kept"] == 3 * T * (2 * HEADS * HEAD + 8 * HEADS)


@pytest.mark.parametrize("name", ["on host", "experts on host"])
def test_what_is_kept_on_the_host_goes_there_and_comes_back_without_a_wait(name, traces):
    trace = traces[name]
    kept, back = trace["bytes"]["kept_on_host"], trace["copied_to_host_bytes"]
    if name == "on host":  # of all layers but the last: input, attention's output, a float64 log-sum-exp a head
        assert kept == 2 * T * (2 * M + 2 * HEADS * HEAD + 8 * HEADS)
    assert kept == back > 0, "each storage left once"
    # All that comes back, and what goes to the device in any step.
    assert trace["copied_bytes"] >= kept
    assert trace["host_waits"] == []


@pytest.mark.parametrize("name", ["2 layers", "p2p", "two_level", "experts"])
def test_a_step_waits_for_nothing(name, traces):
    assert traces[name]["host_waits"] == []
    assert traces[name]["is_whole"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MENDED)
def test_nor_do_parts_that_once_waited(name, mended):
    trace = mended[name]
    assert (trace["host_waits"], trace["is_whole"]) == ([], True)


def test_a_planted_item_is_named_by_file_and_line(traces):
    planted = traces["planted"]
    (wait,) = planted["host_waits"]
    assert wait["operator"] == "aten::_local_scalar_dense"
    file, line = wait["place"].split(":")
    assert file == "longctx/model/decoder.py", "the caller: the planted line is a test's"
    assert int(line) > 0
    assert not planted["is_whole"]


def schedule() -> Schedule:
    batch = synthetic_batch(load_run_config(CASES["p2p"]["flags"]), DOCUMENTS)
    return Schedule.build(SequenceLayout.build("zigzag", 4 * T, 4, batch.documents), batch.documents)


ROW = KV_HEADS * HEAD * 2
"""Values of a row's key and value."""
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD, bytes_per_value=2)


def received(traces: dict[str, dict[str, Any]], name: str, link: str) -> int:
    (found,) = [x for x in traces[name]["links"] if (x["what"], x["link"]) == ("ring hop", link)]
    return found["received_bytes"]


def test_a_ring_receives_what_its_schedule_says(traces):
    plan = schedule()
    for transport in ("p2p", "two_level"):
        # Keys and values come in forward and again in backward, and gradients of this rank's rows in float32.
        keys = 2 * plan.bytes_received(1, SHAPE, transport, 2)
        gradients = {"p2p": p2p_gradient_rows(plan), "two_level": two_level_gradient_rows(plan)}[transport]
        expected = 2 * (keys + 4 * ROW * sum(gradients))
        assert received(traces, transport, WITHIN) + received(traces, transport, BETWEEN) == expected, transport


def test_two_levels_cross_between_nodes_once(traces):
    plan = schedule()
    within, between = plan.rows_by_link(1, 2)
    gradients_within, gradients_between = two_level_gradient_rows(plan)
    assert received(traces, "two_level", WITHIN) == 2 * ROW * (2 * 2 * within + 4 * gradients_within)
    assert received(traces, "two_level", BETWEEN) == 2 * ROW * (2 * 2 * between + 4 * gradients_between)
    assert received(traces, "two_level", BETWEEN) < received(traces, "p2p", BETWEEN)


def p2p_gradient_rows(plan: Schedule) -> tuple[int, int]:
    """(within, between): rank 1's rows whose gradients others return, straight from each."""
    of = [plan.rows_needed(receiver, 1).num_rows for receiver in range(4)]
    return of[0], of[2] + of[3]


def two_level_gradient_rows(plan: Schedule) -> tuple[int, int]:
    """(within, between): from its neighbour, of its own rows and of rank 3's that it holds; from rank 3, its own."""
    within = plan.rows_needed(0, 1).num_rows + plan.rows_needed(0, 3).num_rows
    return within, plan.rows_to_node(1, range(2, 4)).num_rows


def test_the_only_wait_of_experts_across_ranks_is_for_the_sizes_of_messages(traces):
    trace = traces["experts of 4"]
    (wait,) = trace["host_waits"]
    assert wait["place"].startswith("parallel/experts/dispatcher.py:")
    assert wait["times"] == 2, "once a layer: backward has the sizes of forward"
    assert trace["is_whole"]


def test_experts_send_as_much_as_they_receive_to_both_nodes(traces):
    links = {x["link"]: x for x in traces["experts of 4"]["links"] if x["what"].startswith("all-to-all")}
    assert links[WITHIN]["sent_bytes"] == links[WITHIN]["received_bytes"] > 0
    # One peer is in the rank's node, two are in the other.
    assert links[BETWEEN]["sent_bytes"] == 2 * links[WITHIN]["sent_bytes"]
    assert links[BETWEEN]["messages"] == 2 * links[WITHIN]["messages"]
