"""Tokenizers of checkpoints and data: check that ids mean the same text in both, and choose the one to use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data_pipeline.shards.reader import ShardSet
from longctx.checkpoint_format import MANIFEST, CheckpointReader
from longctx.errors import CheckpointError, ConfigError, DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.load_tokenizer import (
    COPIED_FILES,
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    fingerprints,
    generation_settings,
    has_tokenizer,
    load_files,
    same_files,
)

log = logging.getLogger(__name__)


def check_checkpoint_tokenizer(checkpoint: Path, data: ShardSet) -> None:
    """Raise DataError if the shards were built with a tokenizer that the checkpoint does not contain.

    A checkpoint may contain tokenizer.json and tokenizer.model; either may have built the data. Return early if it has
    no tokenizer. Raise CheckpointError if its tokenizer files are damaged.
    """
    # Equal files need no loading.
    if not has_tokenizer(checkpoint) or same_files(checkpoint, data.folder):
        return
    _check_tokenizer_files(checkpoint)
    if data.manifest.tokenizer in fingerprints(checkpoint).values():
        return
    data_tokenizer, checkpoint_tokenizer = load_tokenizer(data.folder), load_tokenizer(checkpoint)
    raise DataError(
        f"{data.folder} was built with a different tokenizer than {checkpoint}: ids would decode to other text.\n"
        f"  data:       {data_tokenizer.describe()}\n"
        f"  checkpoint: {checkpoint_tokenizer.describe()}\n"
        f"Rebuild the data: longctx data build --tokenizer {checkpoint} …"
    )


def check_palette(checkpoint: Path, data: ShardSet) -> None:
    """Raise DataError unless images have the checkpoint's palette; their size and classes may differ.

    Raise CheckpointError if the checkpoint's tokenizer files are damaged.
    """
    _check_tokenizer_files(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    if isinstance(tokenizer, ImageTokenizer) and tokenizer.format.palette == data.image_format.palette:
        return
    raise DataError(
        f"{data.folder} has another palette than {checkpoint}: ids would be other colors.\n"
        f"  data:       {load_tokenizer(data.folder).describe()}\n"
        f"  checkpoint: {tokenizer.describe()}\n"
        f"Rebuild the data: longctx data build --kind images --tokenizer {checkpoint} …"
    )


def check_given_tokenizer(tokenizer: Tokenizer, data: ShardSet) -> None:
    """Raise DataError unless the data was built with ``tokenizer``, which the user named by ``--tokenizer``."""
    if tokenizer.fingerprint != data.manifest.tokenizer:
        raise DataError(
            f"{data.folder} was built with a different tokenizer than {tokenizer.path}: ids would decode to "
            "other text.\n"
            f"Give the data's own tokenizer: --tokenizer {data.folder}"
        )


def _check_tokenizer_files(checkpoint: Path) -> None:
    """Raise CheckpointError if tokenizer files differ from the checkpoint's manifest; pass for a folder without one."""
    # Otherwise a flipped bit would look like another tokenizer, and the hint would be to rebuild the data.
    if not (checkpoint / MANIFEST).is_file():
        return
    reader = CheckpointReader(checkpoint)
    names = [name for name in COPIED_FILES if name in reader.manifest["files"]]
    if problems := reader.verify(names):
        raise CheckpointError(
            f"{checkpoint}: {'; '.join(problems)}.\n"
            "Use another checkpoint of the run, or newest-good, which skips damaged ones."
        )


def check_validation_tokenizer(data: ShardSet, validation: ShardSet) -> None:
    """Raise DataError unless training and validation shards were built with the same tokenizer."""
    if data.manifest.tokenizer == validation.manifest.tokenizer:
        return
    training_tokenizer, validation_tokenizer = load_tokenizer(data.folder), load_tokenizer(validation.folder)
    raise DataError(
        f"data.train and data.validation were built with different tokenizers.\n"
        f"  {data.folder}: {training_tokenizer.describe()}\n"
        f"  {validation.folder}: {validation_tokenizer.describe()}\n"
        f"Rebuild one of them: longctx data build --tokenizer {data.folder} …"
    )


def tokenizer_files_from_data(checkpoint: Path, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files for a run's new checkpoints if the one it starts from has no tokenizer; log warnings.

    These are the files of ``tokenizer``, the data's, and the checkpoint's generation_config.json, unless that file is
    unreadable or its begin or end ids (BOS, EOS) differ from the tokenizer's.
    """
    log.warning(
        "%s has no tokenizer that longctx can read, so this check is skipped: the ids of %s must be the model's.",
        checkpoint,
        tokenizer.path,
    )
    unused_files = [name for name in TOKENIZER_FILES if (checkpoint / name).is_file()]
    if unused_files:
        log.warning(
            "Not copied to this run's checkpoints, which get the data's tokenizer: %s.", ", ".join(unused_files)
        )
    settings = generation_settings(checkpoint)
    if settings is None:
        return tokenizer.files
    files = tokenizer.files | {GENERATION_CONFIG: settings}
    # generation_config.json may change begin and end ids, which are part of the tokenizer's identity.
    if not _is_same_tokenizer(files, tokenizer):
        log.warning(
            "Not copied to this run's checkpoints: %s is unreadable, or its begin or end ids differ from the data "
            "tokenizer's.",
            GENERATION_CONFIG,
        )
        return tokenizer.files
    return files


def _is_same_tokenizer(files: Mapping[str, bytes], tokenizer: Tokenizer) -> bool:
    """Return True if ``files`` load as a tokenizer with the same fingerprint.

    A run that saved another one could not be resumed: ``check_checkpoint_tokenizer`` would refuse its data.
    """
    try:
        return load_files(files, tokenizer.path).fingerprint == tokenizer.fingerprint
    except DataError:
        # Invalid JSON, or ids that the tokenizer does not have.
        return False


def resolve_tokenizer(folder: Path, chosen: Path | None) -> Tokenizer:
    """Load the tokenizer at ``chosen``, or by default the one in the model's folder.

    Raise ConfigError if the folder has a tokenizer and ``chosen`` is another one, CheckpointError if there is neither.
    """
    if chosen is not None:
        tokenizer = load_tokenizer(chosen)
        # With another tokenizer, the model's ids would decode to wrong text.
        if has_tokenizer(folder) and tokenizer.fingerprint not in fingerprints(folder).values():
            raise ConfigError(
                f"--tokenizer {chosen} differs from the tokenizer of {folder}: ids would decode to other text.\n"
                f"  chosen:     {tokenizer.describe()}\n"
                f"  checkpoint: {load_tokenizer(folder).describe()}\n"
                "Leave --tokenizer out."
            )
        return tokenizer
    if not has_tokenizer(folder):
        raise CheckpointError(f"{folder} has no tokenizer. Give one: --tokenizer F")
    return load_tokenizer(folder)


def padded_vocab_decode(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes ids and skips those beyond the tokenizer's vocabulary.

    The model's vocabulary may be padded, and ``Tokenizer.decode`` raises DataError for padding ids.
    """
    return lambda ids: tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])
