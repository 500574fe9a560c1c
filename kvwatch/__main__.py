"""`python -m kvwatch`."""

import sys

from kvwatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
