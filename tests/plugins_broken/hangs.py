"""A plugin whose import never ends."""

import time

time.sleep(1000)
