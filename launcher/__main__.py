"""``python -m launcher VERB``: equivalent to the console script ``longctx``."""

import sys

from longctx_train import end_if_names_clash

if __name__ == "__main__":
    # Before importing our packages: a foreign package with the same name would cause an unexplained ImportError.
    end_if_names_clash()
    from launcher.cli import main

    sys.exit(main())
