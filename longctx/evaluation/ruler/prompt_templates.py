"""Prompt templates from NVIDIA's RULER, word for word, so that prompts are equal.

The texts are data from https://github.com/NVIDIA/RULER, ``scripts/data/synthetic/constants.py`` and the scripts next to
it, Copyright (c) 2024, NVIDIA CORPORATION, licensed under the Apache License, Version 2.0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Template:
    """Prompt text with fields in braces."""

    text: str
    answer_tokens: int
    """Tokens reserved for the answer."""


NIAH = Template(
    text=(
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
        "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
        " The special magic {type_needle_v} for {query} mentioned in the provided text are"
    ),
    answer_tokens=128,
)

VARIABLE_TRACKING = Template(
    text=(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        "Question: Find all variables that are assigned the value {query} in the text above."
        " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned "
        "the value {query}, they are: "
    ),
    answer_tokens=30,
)

COMMON_WORDS = Template(
    text=(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\n"
        "Question: What are the 10 most common words in the above list?"
        " Answer: The top 10 words that appear most often in the list are:"
    ),
    answer_tokens=120,
)

CODED_WORDS = Template(
    text=(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    ),
    answer_tokens=50,
)

QUESTION_ANSWERING = Template(
    text=(
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\n"
        "The following are given documents.\n\n{context}\n\n"
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\nQuestion: {query}"
        " Answer:"
    ),
    answer_tokens=32,
)

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DOCUMENT = "Document {i}:\n{document}"
