"""The verb ``convert``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg, create_mutex_group

from launcher.cli.cli_output import command_line, human_bytes, print_line, progress
from launcher.cli.shared_options import choice_option
from launcher.wording import format_count
from longctx.errors import ConfigError

if TYPE_CHECKING:
    from longctx.conversion import Conversion

_DIRECTION = create_mutex_group(required=True, title="direction")


def convert(
    source: Annotated[Positional[Path], arg(metavar="IN")],
    output: Annotated[Positional[Path], arg(metavar="OUT")],
    *,
    to: Annotated[str | None, _DIRECTION, choice_option("hf", "peft")] = None,
    origin: Annotated[str | None, _DIRECTION, choice_option("hf", "deepspeed", "peft"), arg(name="from")] = None,
    upcycle: Annotated[str | None, _DIRECTION, arg(metavar="EXPERTS[,TOP_K[,GRANULARITY]]")] = None,
    dtype: Annotated[str | None, choice_option("float32", "bfloat16", "float16")] = None,
    tokenizer: Annotated[str | None, arg(metavar="TOKENIZER|none")] = None,
    verify: Annotated[str, choice_option("auto", "tensors", "logits", "none", bare="auto")] = "auto",
    text_only: bool = False,
    mtp: bool = False,
    execute_pickles: bool = False,
    base: Annotated[Path | None, arg(metavar="CHECKPOINT")] = None,
) -> None:
    """Convert checkpoints to and from Hugging Face.

    Every tensor on both sides is used exactly once, or the command fails and names it. The output is read back and
    compared with the input; OUT appears complete and verified, or not at all. Memory holds about one tensor for any
    model size (except when comparing logits).

    Without --dtype no bit is lost: an imported model keeps its dtypes, a trained one its float32 masters. --verify
    tensors reads each tensor back and compares hashes; logits also compares with transformers' logits; auto picks
    logits if transformers has the model and it fits in memory, otherwise tensors.

    Args:
        source: Folder to read.
        output: Folder to create, outside the source.
        to: IN is a checkpoint, or a run folder: its newest checkpoint. hf writes the full model, with adapters merged;
            peft the adapters alone.
        origin: IN is a Hugging Face folder: safetensors, or .bin/.pt, from which only tensors are read; or deepspeed: a
            folder written by DeepSpeed's save_checkpoint, with the model's Hugging Face config.json added; or peft: an
            adapter folder, for the model in --base.
        upcycle: IN is a dense checkpoint or run; OUT becomes an expert model's checkpoint that starts as the same
            function.
        dtype: Dtype of the written weights, even if bits are lost; with --from, the default for later exports.
        tokenizer: With --to, the tokenizer to export instead of the checkpoint's (a file or a folder), or none.
        verify: Comparison to make after writing.
        text_only: With --from hf, leave out parts that the decoder does not have: vision towers, layers for multi-token
            prediction. Without it they are carried along, and exports include them again.
        mtp: With --from hf, read blocks for multi-token prediction as the model's own, which train.mtp_weight then
            trains. Without it they are carried along unchanged.
        execute_pickles: With --from deepspeed: its files are pickles, and loading one runs any code in it, with your
            account's permissions. Use it only for files that you wrote or trust to that extent.
        base: With --from peft, the checkpoint that the adapters belong to.
    """
    pickles = ("--execute-pickles", execute_pickles, "deepspeed")
    for flag, given, kind in (("--text-only", text_only, "hf"), ("--mtp", mtp, "hf"), pickles):
        if given and origin != kind:
            raise ConfigError(f"{flag} works only with --from {kind}. Leave it out.")
    if (base is not None) != (origin == "peft"):
        raise ConfigError("--base names the model of an adapter folder, with --from peft: give both, or neither.")
    if upcycle is not None or "peft" in (to, origin):
        _check_fixed_form(dtype, verify, tokenizer)
    if upcycle is not None:
        return _upcycle(source, output, upcycle)
    if "peft" in (to, origin):
        return _convert_adapters(source, output, base)
    # Deferred: errors in the options above need not wait for torch.
    import torch

    from longctx.conversion import export_checkpoint, import_deepspeed, import_hf

    if to == "hf":
        run, kind = partial(export_checkpoint, tokenizer=tokenizer), "a Hugging Face folder"
    elif tokenizer:
        raise ConfigError("--from copies the folder's tokenizer: leave --tokenizer out, or use it with --to.")
    elif origin == "deepspeed":
        run, kind = partial(import_deepspeed, execute_pickles=execute_pickles), "a checkpoint of step 0"
    else:
        run, kind = partial(import_hf, text_only=text_only, mtp=mtp), "a checkpoint of step 0"
    with progress(f"converting {source}") as update:

        def count(action: str, done: int, total: int) -> None:
            update(done, total, f"{done:,} of {total:,} tensors {action}")

        cast = None if dtype is None else getattr(torch, dtype)
        done = run(source, output, dtype=cast, verify=verify, progress=count)
    _print_conversion(done, kind, to_hf=to == "hf")


def _convert_adapters(source: Path, output: Path, base: Path | None) -> None:
    """Convert a checkpoint's adapters to a PEFT folder, or with a ``base`` the other way around."""
    from longctx.conversion.peft_folder import export_peft, import_peft

    if base is None:
        folder = export_peft(source, output)
        print_line(f"{folder}: a PEFT folder. Next: PeftModel.from_pretrained(base, {str(folder)!r})")
        return
    folder = import_peft(source, output, base)
    print_line(f"{folder}: a checkpoint of adapters on {base}.")
    print_line(f"Next: {command_line('generate', '--checkpoint', folder, '--prompt', 'The', '--max-new-tokens', '40')}")


def _print_conversion(done: Conversion, kind: str, *, to_hf: bool) -> None:
    """Print the written and verified files, and the next command."""
    from longctx.conversion.weights.json_files import read_checkpoint_json
    from longctx.families import auto_class

    size = human_bytes(sum(path.stat().st_size for path in done.folder.rglob("*") if path.is_file()))
    print_line(f"{done.folder}: {kind}, {size}, {str(done.dtype).removeprefix('torch.')}.")
    for line in _validated(done):
        print_line(line)
    if to_hf:
        print_line(
            f'Next: {auto_class(read_checkpoint_json(done.folder / "config.json"))}.from_pretrained("{done.folder}")'
        )
    else:
        print_line(f"Next: {command_line('train', '--config', 'run.toml', '--run.start_from', done.folder)}")


def _check_fixed_form(dtype: str | None, verify: str, tokenizer: str | None) -> None:
    """Raise ConfigError for options that upcycling and adapters ignore."""
    if dtype or verify != "auto":
        raise ConfigError("--upcycle and adapters are always float32, and verified: leave --dtype and --verify out.")
    if tokenizer:
        raise ConfigError("--upcycle and --from peft copy the checkpoint's tokenizer: leave --tokenizer out.")


def _upcycle(source: Path, output: Path, wanted: str) -> None:
    from longctx.conversion.upcycle import Upcycling, upcycle_checkpoint

    with progress(f"upcycling {source}") as update:
        folder = upcycle_checkpoint(
            source,
            output,
            Upcycling.parse(wanted),
            progress=lambda done, total: update(done, total, f"{done:,} of {total:,} tensors"),
        )
    print_line(f"{folder}: a checkpoint of step 0. Next: --run.start_from {folder}")


def _validated(done: Conversion) -> Iterator[str]:
    """Yield a line for each conversion step that did more than move bits, and for each verification."""
    for kinds, count in done.lossy_casts.items():
        yield f"Cast as requested: {format_count(count, 'tensor')} {kinds}, which loses bits."
    if done.auxiliary_files:
        yield f"Copied byte for byte: {', '.join(done.auxiliary_files)}."
    if done.tensors is None:
        yield "Not verified: --verify none."
        return
    yield (
        f"Verified: {format_count(done.tensors.num_tensors, 'tensor')}, "
        f"{human_bytes(done.tensors.num_bytes)}, read back: "
        "names, dtypes, shapes and hashes match."
    )
    if done.logits is not None:
        yield f"Verified: the decoder against transformers, {done.logits}."
    if done.logits_skip_reason is not None:
        yield f"Logits were not compared: {done.logits_skip_reason}."
