"""`python -m fedbraid` is the command `fedbraid`."""

import sys

from fedbraid.cli import main

if __name__ == "__main__":
    sys.exit(main())
