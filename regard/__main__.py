"""python -m regard"""

import sys

from regard_command import main

sys.exit(main())
