"""Pairs for learning translation: LibreOffice's help in two languages, or sentences that this program writes.

    python -m launcher.demos.pairs OUT [--help-pages FOLDER] [--languages en-US de]

Debian's packages libreoffice-help-en-us and libreoffice-help-de (MPL 2.0 and others) have the same pages with the same
paragraph ids. FOLDER contains both, by default the installed ones; without it the program writes numbers in words, with
another word order in the second language. OUT gets train.jsonl and held-out.jsonl with one field per language. Complete
pages are held out, and no sentence from them is in the training data.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from data_pipeline.shuffle import falls_below, key64
from launcher.cli.cli_output import note

INSTALLED = Path("/usr/share/libreoffice/help")
MIN_WORDS, MAX_WORDS = 4, 60
HELD_OUT = 0.02
"""Share of held-out pages."""
_SENTENCES = 20_000
_PARAGRAPHS = re.compile(r"(par|hd)_id\w+")


class _Paragraphs(HTMLParser):
    """Parser that collects the text in each paragraph and headline with an id."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self._id, self._tag, self._hidden = "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if self._id and tag == "span":
            # The pages give the keys for two keyboards: the Mac's are skipped. Nested spans are counted to find the
            # end.
            self._hidden += bool(self._hidden or values.get("class") == "MAC")
        elif not self._id and _PARAGRAPHS.fullmatch(values.get("id") or ""):
            self._id, self._tag = values["id"] or "", tag
            self.texts[self._id] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._id = self._tag = ""
            self._hidden = 0
        elif tag == "span" and self._hidden:
            self._hidden -= 1

    def handle_data(self, data: str) -> None:
        if self._id and not self._hidden:
            self.texts[self._id] += data


def help_pairs(folder: Path, languages: tuple[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (page, texts by language) for paragraphs that exist in both languages and differ."""
    first, second = (folder / language / "text" for language in languages)
    for path in sorted(first.rglob("*.html")):
        other = second / path.relative_to(first)
        if not other.is_file():
            continue
        pages = [paragraphs_of_page(path), paragraphs_of_page(other)]
        for name, text in pages[0].items():
            texts = [text, pages[1].get(name, "")]
            words = [len(text.split()) for text in texts]
            # Equal texts were left untranslated.
            if texts[0] != texts[1] and min(words) >= MIN_WORDS and max(words) <= MAX_WORDS:
                yield str(path.relative_to(first)), dict(zip(_fields(languages), texts, strict=True))


def paragraphs_of_page(path: Path) -> dict[str, str]:
    parser = _Paragraphs()
    parser.feed(path.read_text(encoding="utf-8"))
    return {name: " ".join(text.split()) for name, text in parser.texts.items()}


def _fields(languages: tuple[str, str]) -> tuple[str, str]:
    first, second = (language.partition("-")[0] for language in languages)
    return first, second


_ONES = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"],
}
_TENS = {
    "en": ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"],
    "de": ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"],
}


def written_pairs() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (page, texts) for sums in words. German puts the ones before the tens, and the verb at the end."""
    for number in range(_SENTENCES):
        a, b, c = (key64(number, part) % 100 for part in range(3))
        texts = {
            "en": f"Somebody added {_in_words(a)} and {_in_words(b)} and wrote down {_in_words(c)}.",
            "de": f"Jemand hat {_german(a)} und {_german(b)} zusammengezählt und {_german(c)} aufgeschrieben.",
        }
        yield f"page {number // 10}", texts


def _in_words(number: int) -> str:
    if number < 13:
        return _ONES["en"][number]
    if number < 20:
        return {13: "thirteen", 15: "fifteen", 18: "eighteen"}.get(number, f"{_ONES['en'][number - 10]}teen")
    tens, ones = _TENS["en"][number // 10 - 2], number % 10
    return tens if not ones else f"{tens}-{_ONES['en'][ones]}"


def _german(number: int) -> str:
    if number < 13:
        return _ONES["de"][number]
    if number < 20:
        return {16: "sechzehn", 17: "siebzehn"}.get(number, f"{_ONES['de'][number - 10]}zehn")
    tens, ones = _TENS["de"][number // 10 - 2], number % 10
    if not ones:
        return tens
    # "eins" loses its s before "und".
    word = "ein" if ones == 1 else _ONES["de"][ones]
    return f"{word}und{tens}"


def main(argv: list[str] | None = None) -> None:
    """Write both files and report the pairs' source."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--help-pages", type=Path, default=INSTALLED)
    parser.add_argument("--languages", nargs=2, default=["en-US", "de"])
    options = parser.parse_args(argv)
    languages = (options.languages[0], options.languages[1])
    found = written_pairs()
    if all((options.help_pages / language).is_dir() for language in languages):
        found = help_pairs(options.help_pages, languages)
        note(f"LibreOffice's help of {options.help_pages} in {languages[0]} and {languages[1]}.")
    else:
        note(
            f"{options.help_pages} has no pages in {languages[0]} and {languages[1]}, so sums in words are "
            "used.\n"
            "LibreOffice's help is better data: apt-get install libreoffice-help-en-us libreoffice-help-de, or "
            "LONGCTX_HELP_PAGES=FOLDER."
        )
    held_out, train, seen = [], [], set()
    for page, texts in found:
        pair = json.dumps(texts, ensure_ascii=False)
        if pair in seen:
            continue
        seen.add(pair)
        # By page: sentences on the same page resemble each other. The hash makes the split repeatable.
        (held_out if falls_below(key64(*page.encode()), HELD_OUT) else train).append(texts)
    # A sentence may occur on several pages: no held-out one may remain in the training data.
    held_out_sources = {next(iter(texts.values())) for texts in held_out}
    train = [texts for texts in train if next(iter(texts.values())) not in held_out_sources]
    options.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held-out", held_out)):
        lines = "".join(json.dumps(texts, ensure_ascii=False) + "\n" for texts in rows)
        (options.output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        note(f"{options.output / name}.jsonl: {len(rows):,} pairs")


if __name__ == "__main__":
    main()
