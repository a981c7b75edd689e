"""The verbs ``convert``, ``checkpoint list|verify``, ``generate`` and ``report``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from launcher.cli.console import command, human_bytes, note, plural, progress, say, say_json, table
from launcher.cluster.exit import DONE, FAILED
from longctx.errors import CheckpointError, ConfigError, LongCtxError

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer
    from longctx.conversion import Conversion
    from longctx.generation.sampling import Greedy, Sample
    from longctx.model.decoder import Decoder

_DTYPES = ("float32", "bfloat16", "float16")
_VERIFY = ("auto", "tensors", "logits", "none")
_JSON_HELP = "print JSON instead of a table"


# ------------------------------------------------------------------------------------------------------------- help


def add_verbs(verbs: Any, name: str) -> None:
    """Add the verbs of this module; ``name`` is what stands before a verb on the command line."""
    _add_convert(verbs, name)
    checkpoint = verbs.add_parser(
        "checkpoint", help="list and verify checkpoints", description="List and verify checkpoints."
    )
    inner = checkpoint.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_list(inner, name)
    _add_verify(inner, name)
    _add_generate(verbs, name)
    _add_report(verbs, name)


def _add_convert(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "convert",
        help="convert checkpoints to and from Hugging Face",
        description="Write a checkpoint as a folder that transformers loads, or such a folder as a checkpoint to\n"
        "train on from. Every tensor on both sides is used exactly once, or the command fails and names it.\n"
        "What was written is then read back and compared with what was read; OUT appears whole and verified,\n"
        "or not at all. Memory holds about one tensor, whatever the model's size (comparing logits apart).",
        epilog=f"examples:\n  {name} convert --to hf runs/first exported\n"
        f"  {name} convert --to hf runs/first exported --dtype bfloat16 --verify logits\n"
        f"  {name} convert --from hf exported imported\n"
        f"  {name} convert --upcycle 8,2 imported upcycled",
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to", choices=["hf"], help="IN is a checkpoint, or a run folder: its newest checkpoint")
    direction.add_argument(
        "--from",
        dest="origin",
        choices=["hf"],
        help="IN is a Hugging Face folder: safetensors, or .bin/.pt, of which tensors alone are taken",
    )
    direction.add_argument(
        "--upcycle",
        metavar="EXPERTS[,TOP_K[,GRANULARITY]]",
        help="IN is a dense checkpoint or run; OUT becomes one of an expert model that starts as the same function",
    )
    parser.add_argument("input", type=Path, metavar="IN", help="folder to read")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to make, not within what is read")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of the written weights, even if bits are lost (default: what loses none: an imported model's own dtypes, "
        "a trained one's float32 masters); with --from, what later exports default to",
    )
    parser.add_argument(
        "--verify",
        choices=_VERIFY,
        nargs="?",
        const="auto",
        default="auto",
        help="tensors: read each back and compare hashes; logits: compare with transformers' too; auto (the default): "
        "logits where transformers is installed and the model fits in memory, else tensors; none: neither",
    )
    parser.set_defaults(verb=convert)


def _add_list(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "list",
        help="the checkpoints of a run",
        description="List the committed checkpoints of a run, oldest first. Files are not read: see `verify`.",
        epilog=f"example:\n  {name} checkpoint list runs/first",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    parser.set_defaults(verb=list_checkpoints)


def _add_verify(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "verify",
        help="read every byte of checkpoints and name what is damaged",
        description="Read every file of one checkpoint, or of all checkpoints of a run, and compare sizes, hashes\n"
        "and tensors with the manifest. Names every damaged file; exit code 1 when there is one.",
        epilog=f"example:\n  {name} checkpoint verify runs/first/checkpoints/step_000100",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="checkpoint or run folder")
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    parser.set_defaults(verb=verify)


def _add_generate(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt, on the CPU in float32, until --max-new-tokens or the document's end.\n"
        "Standard output gets the continuation and a newline, nothing else. Greedy, unless an option of\n"
        "sampling is given (--temperature is 1 then, if not given).",
        epilog=f'example:\n  {name} generate --checkpoint runs/first --prompt "def main(" --max-new-tokens 40',
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint, or run folder: its newest checkpoint"
    )
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="the document's beginning; may be empty; --prompt=TEXT if it begins with -",
    )
    parser.add_argument("--max-new-tokens", type=int, required=True, metavar="N", help="tokens to add at most")
    parser.add_argument("--temperature", type=float, metavar="X", help="below 1 sharper, above 1 flatter; 0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that reach P together")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens (0)")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="F.model", help="for a checkpoint that has none of its own (imported ones)"
    )
    parser.set_defaults(verb=generate)


def _add_report(verbs: Any, name: str) -> None:
    parser = verbs.add_parser(
        "report",
        help="write a run's report.html",
        description="Write a run folder's numbers and curves as one self-contained page, also while the run goes on.",
        epilog=f"example:\n  {name} report runs/first",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="run folder")
    parser.add_argument("--output", type=Path, metavar="F.html", help="file to write (default: DIR/report.html)")
    parser.set_defaults(verb=report)


# ---------------------------------------------------------------------------------------------------------- convert


def convert(arguments: argparse.Namespace) -> None:
    """``convert``."""
    if arguments.upcycle:
        _upcycle(arguments)
        return
    import torch

    from longctx.conversion import export_checkpoint, import_hf

    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    run = export_checkpoint if arguments.to == "hf" else import_hf
    with progress(f"converting {arguments.input}") as update:

        def count(done_to_them: str, done: int, total: int) -> None:
            update(done, total, f"{done:,} of {total:,} tensors {done_to_them}")

        done = run(arguments.input, arguments.output, dtype=dtype, verify=arguments.verify, progress=count)
    size = human_bytes(sum(path.stat().st_size for path in done.folder.iterdir()))
    what = "a Hugging Face folder" if arguments.to == "hf" else "a checkpoint of step 0"
    say(f"{done.folder}: {what}, {size}, {str(done.dtype).removeprefix('torch.')}.")
    for line in _verified(done):
        say(line)
    if arguments.to == "hf":
        say(f'Next: AutoModelForCausalLM.from_pretrained("{done.folder}")')
    else:
        start = "deepspeed --hostfile hostfile launcher/pretrain.py --config run.toml"
        say(f"Next: {start} --run.start_from {done.folder}")


def _upcycle(arguments: argparse.Namespace) -> None:
    from longctx.conversion.upcycle import Upcycling, upcycle_checkpoint

    if arguments.dtype or arguments.verify != "auto":
        raise ConfigError("--upcycle writes float32 masters, always read back: leave --dtype and --verify out.")
    with progress(f"upcycling {arguments.input}") as update:
        output = upcycle_checkpoint(
            arguments.input,
            arguments.output,
            Upcycling.parse(arguments.upcycle),
            progress=lambda done, total: update(done, total, f"{done:,} of {total:,} tensors"),
        )
    say(f"{output}: a checkpoint of step 0. Next: --run.start_from {output}, with its shape under [model].")


def _verified(done: Conversion) -> Iterator[str]:
    """What a conversion did besides moving bits, and what is proved of it: a line each."""
    for kinds, count in done.lossy_casts.items():
        yield f"Cast as asked: {plural(count, 'tensor')} {kinds}, which loses bits."
    if done.carried:
        yield f"Came along byte for byte: {', '.join(done.carried)}."
    if done.tensors is None:
        yield "Not verified: --verify none."
        return
    yield (
        f"Verified: {plural(done.tensors.num_tensors, 'tensor')}, {human_bytes(done.tensors.num_bytes)}, read back: "
        "names, dtypes, shapes and hashes are equal."
    )
    if done.logits is not None:
        yield f"Verified: the decoder beside transformers, {done.logits}."
    if done.no_logits is not None:
        yield f"Logits were not compared: {done.no_logits}."


# ------------------------------------------------------------------------------------------------------- checkpoints


def list_checkpoints(arguments: argparse.Namespace) -> None:
    """``checkpoint list``."""
    folders = _checkpoints_of(arguments.run)
    rows = [_facts(folder) for folder in folders]
    if arguments.json:
        say_json(rows)
        return
    if not rows:
        say(f"{arguments.run} holds no committed checkpoint yet.")
        return
    cells = [[_cell(key, row[key]) for key in ("step", "bytes", "ranks", "dtype", "folder")] for row in rows]
    say(table(["step", "size", "ranks", "dtype", "folder"], cells))
    for row in rows:
        if row["problem"]:
            note(f"warning: {row['problem']}")


def verify(arguments: argparse.Namespace) -> int:
    """``checkpoint verify``."""
    from longctx.checkpoint_format import MANIFEST

    folder = arguments.folder
    folders = [folder] if (folder / MANIFEST).is_file() else _checkpoints_of(folder)
    if not folders:
        raise CheckpointError(f"{folder} holds no committed checkpoint to verify.")
    rows = [{"folder": str(path), "problems": _problems(path)} for path in folders]
    damaged = [row for row in rows if row["problems"]]
    if arguments.json:
        say_json(rows)
    else:
        for row in rows:
            say(f"{row['folder']} is {'damaged:' if row['problems'] else 'whole.'}")
            for problem in row["problems"]:
                say(indent(problem, "  "))
        if damaged and len(damaged) < len(rows):
            say("Go on from the newest whole one with --run.resume newest-good.")
    return FAILED if damaged else DONE


def _checkpoints_of(run: Path) -> list[Path]:
    """Committed checkpoints of a run folder, oldest first; CheckpointError where there can be none."""
    from longctx import checkpoint_format
    from longctx.checkpoint_format import CHECKPOINTS, MANIFEST

    if (run / MANIFEST).is_file():
        raise CheckpointError(f"{run} is a checkpoint, not a run. Give the run's folder, which has checkpoints/ in it.")
    if not (run / CHECKPOINTS).is_dir() and not (run / "config.toml").is_file():
        what = "holds neither checkpoints/ nor a config.toml" if run.is_dir() else "does not exist"
        raise CheckpointError(f"{run} is not a run folder: it {what}. Give the folder that run.output_dir named.")
    return checkpoint_format.list_checkpoints(run)


def _facts(folder: Path) -> dict[str, Any]:
    """What the manifest says; where it is damaged, what is wrong with it."""
    from longctx.checkpoint_format import CheckpointReader

    facts: dict[str, Any] = {"step": int(folder.name.removeprefix("step_")), "folder": str(folder)}
    try:
        manifest = CheckpointReader(folder).manifest
    except LongCtxError as error:
        return facts | {"bytes": None, "ranks": None, "dtype": None, "problem": str(error)}
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    ranks = manifest["training"].get("world_size")
    return facts | {"bytes": size, "ranks": ranks, "dtype": manifest["dtype"], "problem": None}


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    return human_bytes(value) if key == "bytes" else str(value)


def _problems(folder: Path) -> list[str]:
    """Everything that is wrong with one checkpoint, its files read one by one."""
    from longctx.checkpoint_format import CheckpointReader
    from longctx.conversion.convert import check_tensors

    try:
        reader = CheckpointReader(folder)
        check_tensors(reader)
    except LongCtxError as error:
        return [str(error)]
    files = reader.manifest["files"]
    problems, done = [], 0
    with progress(f"reading {folder}", total=sum(entry["bytes"] for entry in files.values())) as update:
        for name, entry in files.items():
            problems += reader.verify([name])
            done += entry["bytes"]
            update(done, note=human_bytes(done))
    return problems


# ---------------------------------------------------------------------------------------------------------- generate


def generate(arguments: argparse.Namespace) -> None:
    """``generate``."""
    strategy = _strategy(arguments)
    from longctx.checkpoint_format import find_checkpoint
    from longctx.generation.load import load_model
    from longctx.generation.loop import generate as continue_ids

    folder = _with_hint(arguments.checkpoint) or find_checkpoint(arguments.checkpoint)
    tokenizer = _tokenizer(folder, arguments.tokenizer)
    with progress(f"loading {folder}"):
        model = load_model(folder)
    prompt_ids = [tokenizer.document_begin, *tokenizer.encode(arguments.prompt).tolist()]
    _warn_of_limits(model, tokenizer, len(prompt_ids) + arguments.max_new_tokens)
    started = time.monotonic()
    with progress(f"continuing {len(prompt_ids):,} tokens"):
        ids = continue_ids(model, prompt_ids, arguments.max_new_tokens, strategy, stop_ids={tokenizer.document_end})
    seconds = time.monotonic() - started
    say(_continuation(tokenizer, prompt_ids, ids))
    end = ", then the document ended" if ids and ids[-1] == tokenizer.document_end else ""
    note(f"{len(ids):,} tokens in {seconds:.1f} s{end}.")


def _strategy(arguments: argparse.Namespace) -> Greedy | Sample:
    """Greedy, or sampling as soon as an option of it is given; ConfigError where an option would do nothing."""
    given = {
        name: getattr(arguments, name)
        for name in ("temperature", "top_k", "top_p", "seed")
        if getattr(arguments, name) is not None
    }
    from longctx.generation.sampling import Greedy, Sample

    if given.get("temperature") == 0:
        if idle := [f"--{name.replace('_', '-')}" for name in given if name != "temperature"]:
            raise ConfigError(f"--temperature 0 is greedy, so {', '.join(idle)} would do nothing. Leave one out.")
        return Greedy()
    return Sample(**given) if given else Greedy()


def _with_hint(folder: Path) -> None:
    """CheckpointError for a Hugging Face folder, with the way in."""
    from longctx.checkpoint_format import MANIFEST

    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} is a Hugging Face folder, not a checkpoint.\n"
            f"Convert it first: {command('convert', '--from', 'hf', folder, 'OUT')}"
        )


def _tokenizer(checkpoint: Path, chosen: Path | None) -> Tokenizer:
    from data_pipeline.tokenizer import Tokenizer
    from longctx.checkpoint_format import TOKENIZER

    own = checkpoint / TOKENIZER
    if chosen is None and not own.is_file():
        raise CheckpointError(f"{checkpoint} has no {TOKENIZER} of its own. Name one: --tokenizer F.model")
    return Tokenizer.load(own if chosen is None else chosen)


def _warn_of_limits(model: Decoder, tokenizer: Tokenizer, num_tokens: int) -> None:
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {model.config.vocab_size}. "
            "Take the tokenizer that the model was trained with."
        )
    if num_tokens > model.config.max_positions:
        note(f"warning: up to {num_tokens:,} tokens, but the model is meant for {model.config.max_positions:,}.")


def _continuation(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> str:
    """The text that follows the prompt's; ids that the tokenizer does not have are left out and reported."""
    known = [i for i in ids if i < tokenizer.vocab_size]
    if len(known) < len(ids):
        note(f"warning: left out {len(ids) - len(known)} ids that the tokenizer does not have.")
    # Decoded together: some tokenizers drop the first space of whatever they are given.
    prompt, whole = tokenizer.decode(prompt_ids), tokenizer.decode([*prompt_ids, *known])
    return whole[len(prompt) :] if whole.startswith(prompt) else tokenizer.decode(known)


# ------------------------------------------------------------------------------------------------------------ report


def report(arguments: argparse.Namespace) -> None:
    """``report``."""
    from launcher.report.page import write_report

    with progress(f"drawing {arguments.folder}"):
        path = write_report(arguments.folder, arguments.output)
    say(str(path))
