"""`python -m ptxemu` is the command line."""

import sys

from ptxemu.cli.main import main

sys.exit(main())
