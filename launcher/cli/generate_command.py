"""The verb ``generate``; ``launcher/generate.py`` executes it over ranks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from tyro.conf import OmitArgPrefixes, UseAppendAction, arg, create_mutex_group

from launcher.cli.cli_output import note, progress, read_line, write
from launcher.cli.generate_images import ContinuedImage, draw_continuations
from launcher.cli.shared_options import RankFlags
from launcher.wording import format_count
from longctx.errors import ConfigError, LongCtxError

if TYPE_CHECKING:
    from array import array

    from launcher.generation.generation_options import GenerationCommandOptions
    from launcher.generation.generation_run import GenerationSession
    from launcher.generation.interactive_chat import InteractiveChat
    from longctx.generation.beams import Beams
    from longctx.generation.penalties import Penalties
    from longctx.generation.sampling import Greedy, Sampling
    from longctx.tokenizer import Tokenizer

_PROMPT = create_mutex_group(required=False, title="prompt")
Strings = UseAppendAction[list[str]]
_NO_IMAGE = ContinuedImage()


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Token choice: greedy by default, sampling with one of the first five options, search with --beams."""

    temperature: float | None = None
    """Below 1 sharper, above 1 flatter, 0 greedy; 1 if another sampling option is given."""
    top_k: int | None = None
    """Sample from this many most likely tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens that reach this probability together."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the highest probability."""
    seed: int | None = None
    """Seed for sampling: the same seed gives the same tokens; prompt n of a file takes seed + n; default: 0."""
    beams: int | None = None
    """Number of beams to search with; the text is printed when the search ends."""
    length_penalty: float | None = None
    """Beams are compared by log-likelihood divided by length to this power; default: 1; more favours long ones."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt or the continuation (multiplies those below 0)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the continuation."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the continuation."""
    stop: Annotated[Strings, arg(metavar="TEXT")] = field(default_factory=list)
    """Stop before this text; may be repeated."""

    def strategy(self) -> Greedy | Sampling | Beams:
        """Return beams or sampling if one of their options is set. Raise ConfigError for an option without effect."""
        from longctx.generation.beams import Beams
        from longctx.generation.sampling import Greedy, Sampling

        # Options left out are dropped here: one that is set and that the chosen strategy ignores is an error.
        sampling = _given(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )
        searching = _given(num_beams=self.beams, length_penalty=self.length_penalty)
        if self.beams is not None:
            _refuse(sampling, f"--beams {self.beams} does not sample")
            return Beams(**searching)
        _refuse(searching, "without --beams there is no beam search")
        # A temperature of 0 conventionally means greedy.
        if sampling.get("temperature") == 0:
            del sampling["temperature"]
            _refuse(sampling, "--temperature 0 is greedy")
            return Greedy()
        if not sampling:
            return Greedy()
        return Sampling(**sampling)

    def penalties(self) -> Penalties:
        """Return the penalties from the options."""
        from longctx.generation.penalties import Penalties

        return Penalties(
            repetition=self.repetition_penalty, presence=self.presence_penalty, frequency=self.frequency_penalty
        )


def _given(**options: float | None) -> dict:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(options: Mapping[str, float], why: str) -> None:
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ConfigError(f"{why}, so {names} would have no effect. Leave one out.")


def _flags_set(values: Mapping[str, Any]) -> list[str]:
    """Return the flags among these options with a value."""
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value not in (None, "", False, [])]


def _required(max_new_tokens: int | None) -> int:
    """Return the limit; raise ConfigError if it is not given."""
    if max_new_tokens is None:
        raise ConfigError(
            "--max-new-tokens N is missing: the maximum tokens to add to a text. An image model continues a picture "
            "instead: --image FILE.png --output NEW.png."
        )
    return max_new_tokens


def _has_template(source: Path) -> bool:
    """Return True if a tokenizer has a chat template, and say so; one that cannot be loaded is reported when it is
    used.
    """
    from longctx.chat.template_files import has_template
    from longctx.tokenizer import load_tokenizer
    from parallel.runtime.launched import environment_rank

    found = False
    with suppress(LongCtxError):
        found = has_template(load_tokenizer(source))
    if environment_rank()[0] == 0:
        note("Prompts are rendered by the model's chat template." if found else "The model has no chat template.")
    return found


def generate_text(
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    prompt: Annotated[str | None, _PROMPT, arg(metavar="TEXT")] = None,
    prompt_file: Annotated[Path | None, _PROMPT, arg(metavar="F|-")] = None,
    prompts_file: Annotated[Path | None, _PROMPT, arg(metavar="F|-")] = None,
    images: OmitArgPrefixes[ContinuedImage] = _NO_IMAGE,
    max_new_tokens: int | None = None,
    chat: bool = False,
    chat_template: Literal["none", "auto"] = "none",
    system: str = "",
    choosing: OmitArgPrefixes[SamplingFlags],
    output: Annotated[Path | None, arg(metavar="F")] = None,
    max_sequences: int | None = None,
    tokenizer: Annotated[Path | None, arg(metavar="TOKENIZER")] = None,
    beyond_positions: bool = False,
    ranks: OmitArgPrefixes[RankFlags],
) -> None:
    """Continue one prompt or many; a model with an encoder reads the prompt and writes its target.

    Generates until --max-new-tokens or the document's end, greedily unless a sampling option or --beams is given. With
    --image, an image model continues a picture below its upper rows, and writes it to --output. Standard output
    receives only the continuation, as it is generated, and a newline. Over ranks: --ranks N starts N ranks here,
    --hostfile FILE those on its hosts.

    Args:
        checkpoint: Checkpoint, run folder (its newest checkpoint), or Hugging Face folder.
        prompt: Start of the document; may be empty; --prompt=TEXT if it starts with a dash.
        prompt_file: UTF-8 file with the prompt, up to its last newline, of any length; - is standard input.
        prompts_file: JSON lines, each with a "prompt"; a JSON line is written for each, in the same order.
        images: A picture to continue instead of a text.
        max_new_tokens: Maximum tokens to add; required for texts.
        chat: Render each prompt (the user's text, or a line's "messages") with the model's chat template; end with the
            reply. Without a prompt, each line on standard input is a turn, answered before the next is read.
        chat_template: auto is --chat if the model has a chat template, and says so.
        system: System turn of a chat.
        choosing: How tokens are chosen.
        output: New file for the result, instead of standard output, which deepspeed writes to as well.
        max_sequences: Prompts from --prompts-file in progress together, per group of ranks; default: as memory allows,
            up to 8.
        tokenizer: For a folder without its own: SentencePiece model, tokenizer.json, or a folder with one.
        beyond_positions: Allow prompt and answer to exceed the model's positions.
        ranks: Device, memory, and ranks that deepspeed or torchrun starts.
    """
    from launcher.generation.generation_options import GenerationCommandOptions, PromptSource

    if images.is_used:
        of_texts = {"prompt": prompt, "prompt_file": prompt_file, "prompts_file": prompts_file, "system": system}
        of_texts |= {"max_new_tokens": max_new_tokens, "chat": chat, "chat_template": chat_template != "none"}
        of_texts |= {"max_sequences": max_sequences, "beyond_positions": beyond_positions, "stop": choosing.stop}
        draw_continuations(
            images,
            choosing.strategy(),
            _flags_set(of_texts),
            checkpoint=checkpoint,
            output=output,
            penalties=choosing.penalties(),
            tokenizer=tokenizer,
            **ranks.values(),
        )
        return
    images.check_unused()
    if chat_template == "auto" and not chat:
        chat = _has_template(tokenizer or checkpoint)
    options = GenerationCommandOptions(
        checkpoint=checkpoint,
        prompts=PromptSource(text=prompt, file=prompt_file, lines=prompts_file, chat=chat, system=system),
        max_new_tokens=_required(max_new_tokens),
        strategy=choosing.strategy(),
        penalties=choosing.penalties(),
        stop_strings=tuple(choosing.stop),
        max_sequences=max_sequences,
        output=output,
        tokenizer=tokenizer,
        beyond_positions=beyond_positions,
        **ranks.values(),
    )
    _continue_texts(options)


def _continue_texts(options: GenerationCommandOptions) -> None:
    """Continue the prompts, or answer in a chat."""
    from launcher.generation.generation_run import session
    from parallel.runtime.launched import environment_rank

    # All ranks compute; rank 0 writes.
    is_rank_0 = environment_rank()[0] == 0
    with session(options) as current:
        if not is_rank_0:
            _follow(current, options)
            return
        with progress(f"loading {current.model_source.folder}"):
            current.load()
        if options.talks:
            _talk(current, options)
        elif options.has_many:
            _continue_all(current, options)
        else:
            _continue_one(current, options)


def _follow(session: GenerationSession, options: GenerationCommandOptions) -> None:
    # Ranks other than 0 take part in the same collectives, so they must consume every token, or rank 0 would hang.
    session.load()
    if options.talks:
        for _, tokens in session.answer_prompts(lambda: None):
            _exhaust(tokens)
    elif options.has_many:
        _exhaust(session.each())
    else:
        _exhaust(session.stream())


def _exhaust(work: Iterable[Any]) -> None:
    for _ in work:
        pass


def _continue_one(session: GenerationSession, options: GenerationCommandOptions) -> None:
    started = time.monotonic()
    (prompt_ids,) = session.prompt_ids
    with _result_to(options.output) as write_out:
        written = _write_text(session, prompt_ids, session.stream(), write_out)
    _summarise(written, session.stop_ids, time.monotonic() - started)


def _talk(session: GenerationSession, options: GenerationCommandOptions) -> None:
    """Answer the lines on standard input, each in the context of earlier turns."""
    from launcher.generation.interactive_chat import InteractiveChat

    talk, num_responses = InteractiveChat(options, session.model_source), 0
    if sys.stdin.isatty():
        note("Type a message. Ctrl-D ends the chat.")
    with closing(talk), _result_to(options.output) as write_out:
        for prompt_ids, tokens in session.answer_prompts(lambda: _next_question(talk)):
            written = _write_text(session, prompt_ids, tokens, write_out)
            # Without a stop id the reply was cut off, which its text alone does not show.
            if len(written.ids) == options.max_new_tokens and written.ids[-1] not in session.stop_ids:
                note(f"The reply was cut off at --max-new-tokens {options.max_new_tokens}.")
            talk.add_reply(written.text)
            num_responses += 1
    if not num_responses:
        note("No message: standard input is empty.")


def _next_question(talk: InteractiveChat) -> array[int] | None:
    """Return the ids up to the reply to the next line, or None at the end of standard input.

    Raise LongCtxError if a line allows no reply; on a terminal, show the error and read another line instead.
    """
    while True:
        try:
            line = read_line("> ")
            if line is None:
                return None
            if line.strip():
                return talk.add_question(line)
        except LongCtxError as error:
            if not sys.stdin.isatty():
                raise
            note(str(error))


class _Written(NamedTuple):
    """Written continuation."""

    ids: list[int]
    text: str
    read_seconds: float
    """Time until the first token."""


def _write_text(
    session: GenerationSession, prompt_ids: Sequence[int], tokens: Iterator[int], write_out: Callable[[str], None]
) -> _Written:
    """Write a continuation's text as it is generated, then a newline."""
    started = time.monotonic()
    # A progress bar and the text would share the terminal's last line, so the bar ends before the first token is
    # printed.
    with progress(f"reading {len(prompt_ids):,} tokens"):
        first = list(islice(tokens, 1))
    read_seconds = time.monotonic() - started
    text = _Text(session.model_source.tokenizer, session.before(prompt_ids), session.options.stop_strings)
    ids: list[int] = []
    parts: list[str] = []
    for token in chain(first, tokens):
        ids.append(token)
        parts.append(text.add(token))
        write_out(parts[-1])
    parts.append(text.finish())
    write_out(f"{parts[-1]}\n")
    _warn_of_unknown(text.num_unknown)
    return _Written(ids, "".join(parts), read_seconds)


def _continue_all(session: GenerationSession, options: GenerationCommandOptions) -> None:
    """Write one JSON line per prompt, in order."""
    started, num_lines, num_tokens, num_unknown = time.monotonic(), 0, 0, 0
    prompts = session.prompts
    note(f"continuing {format_count(len(prompts), 'prompt')} …")
    if session.mesh.data > len(prompts):
        note(
            f"warning: {session.mesh.data} groups of ranks (parallel.context={session.mesh.context}) share "
            f"{format_count(len(prompts), 'prompt')}: some stay idle."
        )
    try:
        with _result_to(options.output) as write_out:
            for index, ids in session.each():
                before = session.before(session.prompt_ids[index])
                text = _Text(session.model_source.tokenizer, before, options.stop_strings)
                continuation = "".join([text.add(token) for token in ids]) + text.finish()
                result = {**prompts[index].fields, "index": index, "continuation": continuation, "tokens": len(ids)}
                write_out(f"{json.dumps(result, ensure_ascii=False)}\n")
                num_lines += 1
                num_tokens += len(ids)
                num_unknown += text.num_unknown
    finally:
        # Also after Ctrl-C, or if one group of ranks has failed.
        if num_lines < len(prompts):
            note(f"{num_lines:,} of {format_count(len(prompts), 'prompt')} are written.")
    _warn_of_unknown(num_unknown)
    note(f"{format_count(len(prompts), 'prompt')}, {num_tokens:,} tokens in {time.monotonic() - started:.1f} s.")


@contextmanager
def _result_to(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes to a new file or to standard output."""
    if path is None:
        yield write
        return
    # Unbuffered: each line is written at once, so a kill leaves no partial line.
    with path.open("xb", buffering=0) as file:

        def write_out(text: str) -> None:
            # JSON allows half a surrogate pair; it is written as an escape sequence.
            file.write(text.encode(errors="backslashreplace"))

        yield write_out


class _Text:
    """A continuation's text up to the first stop string: the joined results from ``add`` and ``finish``.

    Ids that the tokenizer does not have are left out and counted.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_strings: Sequence[str]) -> None:
        from longctx.generation.detokenize import TextStream
        from longctx.generation.stop_strings import TextBeforeStop

        self._vocab_size = tokenizer.vocab_size
        self._text = TextStream(tokenizer.decode, prompt_ids)
        self._gate = TextBeforeStop(stop_strings)
        self.num_unknown = 0

    def add(self, token: int) -> str:
        """Return the text that this token completes."""
        # A model's vocabulary may be padded beyond its tokenizer's.
        if token >= self._vocab_size:
            self.num_unknown += 1
            return ""
        return self._gate.add(self._text.add(token))

    def finish(self) -> str:
        """Return the remaining text."""
        return self._gate.add(self._text.finish()) + self._gate.finish()


def _warn_of_unknown(count: int) -> None:
    if count:
        note(f"warning: left out {count} ids missing from the tokenizer.")


def _summarise(written: _Written, ends: set[int], seconds: float) -> None:
    """Print the token count, the time, and why generation ended."""
    ids, read_seconds = written.ids, written.read_seconds
    rate = ""
    if len(ids) > 1 and seconds > read_seconds:
        rate = f" ({(len(ids) - 1) / (seconds - read_seconds):.1f} per second after the first)"
    end = ""
    if ids and ids[-1] in ends:
        end = ", then the document ended"
    note(f"{len(ids):,} tokens in {seconds:.1f} s{rate}{end}.")
