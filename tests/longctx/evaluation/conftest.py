"""A setting in which every task can make samples, and short lengths at which each still does."""

from __future__ import annotations

import pytest

from longctx.evaluation import Haystack, RulerFiles, Setting
from tests.longctx.evaluation.pieces import PieceTokenizer
from tests.longctx.evaluation.texts import haystack, write_hotpotqa, write_squad


@pytest.fixture(scope="session")
def text() -> Haystack:
    return haystack()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> RulerFiles:
    folder = tmp_path_factory.mktemp("questions")
    return RulerFiles(squad=write_squad(folder / "squad.json"), hotpotqa=write_hotpotqa(folder / "hotpotqa.json"))


@pytest.fixture(scope="session")
def setting(text: Haystack, files: RulerFiles) -> Setting:
    return Setting(tokenizer=PieceTokenizer(begin=1), haystack=text, ruler=files)
