"""`python -m moestream` is the `moestream` command."""

import sys

from moestream.cli import main

if __name__ == "__main__":
    sys.exit(main())
