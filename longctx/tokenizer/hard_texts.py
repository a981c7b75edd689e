"""Texts that different tokenizers have encoded differently."""

from __future__ import annotations

from longctx.tokenizer.text_chunks import SPACE_MARK

HARD_TEXTS = (
    "",
    " ",
    "   leading, trailing   ",
    "def f(x):\n\tif x:\n\t\treturn  [x,   2]\n\n\n",
    "a\r\nb\rc\n\r",
    "nul \x00 bell \x07 delete \x7f escape \x1b[0m",
    "\ufeffBOM, zero\u200bwidth, no\u00a0break, ideographic\u3000space, separators \u2028\u2029\x85",
    "emoji 🙂👩‍👩‍👧‍👦🏳️‍🌈 and \U0010ffff",
    "e\u0301 é ﬁ ① Å ｆｕｌｌ ẛ̣ 가 각",
    "中文，日本語、한국어 עברית العربية हिन्दी",
    "1234567890 3.14159 0x00FF 1e-10",
    "<s></s><unk><pad><0x41><0x00><|endoftext|> <|document_begin|>text<|document_end|><|padding|>",
    f"{SPACE_MARK}raw{SPACE_MARK}{SPACE_MARK}mark {SPACE_MARK}",
    "=" * 67 + "-" * 33 + " " * 41 + "\t" * 9 + "ababababa" + "aaaaaaaaaaaa",
)
"""Texts for checking exports, each with a different difficulty."""
