"""``python -m launcher VERB``: the same as the console script ``longctx``."""

import sys

from longctx_train import main

if __name__ == "__main__":
    sys.exit(main())
