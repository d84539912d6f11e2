"""`python -m ds41ctl`: the same entry as the console script."""

import sys

from ds41ctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
