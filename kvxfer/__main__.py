"""`python -m kvxfer` and the `kvxfer` script."""

import sys

from kvxfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
