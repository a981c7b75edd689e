"""Evaluate, over ranks: ``deepspeed --hostfile hostfile launcher/evaluate.py --checkpoint DIR --tasks A,B …``.

The options are those of the verb ``evaluate``, which is the same in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The script's own folder would shadow top-level modules of the same names; import from the repository instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from longctx_train import end_if_names_clash

# Before any package of ours: another's of the same name would end in an ImportError.
end_if_names_clash()

from launcher.cli.verbs import main_over_ranks
from launcher.cluster.exit import run_script

if __name__ == "__main__":
    run_script(lambda: main_over_ranks("evaluate", sys.argv[1:]), interrupted="Interrupted.")
