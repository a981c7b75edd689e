"""What a model with an encoder writes of a source: as if each token were chosen by reading everything again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from longctx.errors import ConfigError
from longctx.generation import Beams, Penalties, Sampling, generate, generate_batch
from longctx.model.decoder import Decoder
from parallel.mesh import Mesh
from parallel.parallelize import build_empty_decoder
from tests.helpers import on_ranks
from tests.longctx.pairs import one_row
from tests.longctx.samples import dense_config, randomize

BOTH = {"num_layers": 2, "encoder_layers": 2}
MODELS = {
    "rope": dense_config(**BOTH),
    "t5": dense_config(**BOTH, position="t5"),
    "learned": dense_config(**BOTH, position="learned", norm="layernorm", activation="relu"),
    "windows": dense_config(**BOTH, layers=("window", "full"), window=3),
    "linear": dense_config(**BOTH, layers=("linear", "full")),
}
SOURCES = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9, 13)]
START, NEW = [1], 10


def model_of(name: str) -> Decoder:
    model = Decoder(MODELS[name]).eval()
    randomize(model, std=0.5)
    return model


@torch.no_grad()
def by_definition(model: Decoder, source: list[int]) -> list[int]:
    """Greedy tokens; each from a pass over the source and all that was written."""
    ids = list(START)
    for _ in range(NEW):
        encoded = model.encode(one_row([torch.tensor(source)]))
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None], source=encoded)
        ids.append(int(model.logits(hidden)[0, -1].argmax()))
    return ids[len(START) :]


@pytest.mark.parametrize("name", MODELS)
def test_one_and_many_write_the_same(name):
    model = model_of(name)
    wanted = [by_definition(model, source) for source in SOURCES]
    assert len({tuple(ids) for ids in wanted}) > 1, "the source must matter"
    assert [generate(model, START, NEW, source_ids=source) for source in SOURCES] == wanted
    # Fewer at once than there are: some enter when others have ended.
    stops = {wanted[0][3]}
    ends = [next((n + 1 for n, token in enumerate(ids) if token in stops), NEW) for ids in wanted]
    for most in (1, 3, 8):
        prompts = [START] * len(SOURCES)
        found = dict(generate_batch(model, prompts, NEW, sources=SOURCES, stop_ids=stops, max_sequences=most))
        assert [found[n] for n in range(len(SOURCES))] == [ids[:end] for ids, end in zip(wanted, ends, strict=True)]


def test_sequences_that_enter_alone_and_together_share_a_pass():
    """Of each some layers' keys are kept and some are not, whoever stands first."""
    model = model_of("rope")
    sources = [*SOURCES, SOURCES[0][::-1], [9, 9]]
    prompts = [[1], [2], [3], [4], [5], [6]]
    wanted = [generate(model, prompt, 8, source_ids=s) for prompt, s in zip(prompts, sources, strict=True)]
    for stop in sorted({token for ids in wanted for token in ids}):
        ends = [next((n + 1 for n, token in enumerate(ids) if token == stop), 8) for ids in wanted]
        for most in (2, 3):
            options = {"sources": sources, "stop_ids": [stop], "max_sequences": most}
            found = dict(generate_batch(model, prompts, 8, **options))
            assert [found[n] for n in range(6)] == [ids[:end] for ids, end in zip(wanted, ends, strict=True)]
    assert model.joined_sources is None


def test_beams_and_draws_of_many_are_those_of_one():
    model = model_of("rope")
    beams = [Beams(num_beams=3, length_penalty=0.6)] * len(SOURCES)
    # Prompt n draws with the seed plus n.
    draws = [Sampling(temperature=2.0, seed=5 + n) for n in range(len(SOURCES))]
    penalties = Penalties(repetition=1.2)
    for strategies in (beams, draws):
        alone = [
            generate(model, START, NEW, strategy, source_ids=source, penalties=penalties)
            for strategy, source in zip(strategies, SOURCES, strict=True)
        ]
        found = generate_batch(model, [START] * len(SOURCES), NEW, strategies[0], sources=SOURCES, penalties=penalties)
        together = dict(found)
        assert [together[n] for n in range(len(SOURCES))] == alone


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_ranks_write_what_one_process_does():
    world_size = dist.get_world_size()
    for layout, name in (("zigzag", "rope"), ("contiguous", "t5"), ("balanced", "windows")):
        alone = model_of(name)
        model = build_empty_decoder(MODELS[name], Mesh.build(context=world_size), layout=layout).eval()
        model.load_state_dict(alone.state_dict())
        for source in SOURCES:
            assert generate(model, START, NEW, source_ids=source) == by_definition(alone, source), (layout, name)
        beams = Beams(num_beams=2)
        found = dict(generate_batch(model, [START] * 4, NEW, beams, sources=SOURCES))
        wanted = [generate(alone, START, NEW, beams, source_ids=source) for source in SOURCES]
        assert [found[n] for n in range(4)] == wanted
        # What several sequences read is behind prompts of several tokens too.
        prompts = [[1, *range(2, n)] for n in (3, 9, 30, 2)]
        found = dict(generate_batch(model, prompts, NEW, sources=SOURCES, chunk_tokens=4))
        wanted = [
            generate(alone, prompt, NEW, source_ids=source) for prompt, source in zip(prompts, SOURCES, strict=True)
        ]
        assert [found[n] for n in range(4)] == wanted


def test_what_is_refused():
    model = model_of("rope")
    with pytest.raises(ConfigError, match="got no source"):
        generate(model, START, NEW)
    with pytest.raises(ConfigError, match=r"got a source with model\.encoder_layers=0"):
        generate(Decoder(dense_config()), START, NEW, source_ids=[3])
    with pytest.raises(ConfigError, match="the source is empty"):
        generate(model, START, NEW, source_ids=[])
    with pytest.raises(ConfigError, match="source id 97 is not in the model's vocabulary"):
        generate(model, START, NEW, source_ids=[97])
    # At the call, before another one's continuation is lost.
    with pytest.raises(ConfigError, match=r"prompt 1 of 2: the source is empty"):
        generate_batch(model, [START, START], NEW, sources=[[3], []])
    learned = Decoder(dense_config(**BOTH, position="learned", max_positions=16))
    with pytest.raises(ConfigError, match=r"prompt 1 of 2: a source of 17 tokens .* Shorten it to 16"):
        generate_batch(learned, [START, START], NEW, sources=[[3], [3] * 17])
    with pytest.raises(ConfigError, match=r"a prompt of 17 tokens .* Shorten it to 16"):
        generate(learned, [3] * 17, NEW, source_ids=[3])
    array = torch.tensor(SOURCES[0]).numpy()
    assert generate(model, START, NEW, source_ids=array) == generate(model, START, NEW, source_ids=SOURCES[0])
    with pytest.raises(ConfigError, match="2 prompts and 1 sources"):
        generate_batch(model, [START, START], NEW, sources=[[3]])
