"""``python -m examples.service_demo``"""

import io
import sys

if isinstance(sys.stdout, io.TextIOWrapper):
    # An old terminal gets question marks instead of a traceback.
    sys.stdout.reconfigure(errors="replace")
try:
    # Importing takes a moment, in which somebody may press Ctrl-C already.
    from examples.service_demo.command import main

    sys.exit(main())
except KeyboardInterrupt:
    sys.exit(130)
