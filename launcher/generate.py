"""Generate over ranks: ``deepspeed --hostfile hostfile launcher/generate.py --checkpoint DIR --prompt TEXT …``.

Options are those of the verb ``generate``, which does the same in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The script's own folder would shadow top-level modules with the same names; import from the repository instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from longctx_train import end_if_names_clash

# Before any of our packages: a foreign one with the same name would end in an ImportError.
end_if_names_clash()

from launcher.cli.cli_commands import main_over_ranks
from launcher.cluster.exit import run_script

if __name__ == "__main__":
    run_script(lambda: main_over_ranks("generate", sys.argv[1:]), abort_message="Interrupted.")
