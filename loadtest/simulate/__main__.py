"""`python -m loadtest.simulate …`, for machines without the rest of Legato."""

import sys

from loadtest.simulate.cli import main

sys.exit(main())
