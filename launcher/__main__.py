"""``python -m launcher VERB``: the same as the console script ``longctx``."""

import sys

from longctx_train import end_if_names_clash

if __name__ == "__main__":
    # Before any package of ours: another's of the same name would end in an ImportError.
    end_if_names_clash()
    from launcher.cli import main

    sys.exit(main())
