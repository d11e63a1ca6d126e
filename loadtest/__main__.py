"""`python -m loadtest …`, for machines without the rest of Legato."""

import sys

from loadtest.cli import main

sys.exit(main())
