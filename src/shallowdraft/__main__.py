"""`python -m shallowdraft VERB …`, which is also how torchrun starts it."""

import sys

from shallowdraft.cli import main

sys.exit(main())
