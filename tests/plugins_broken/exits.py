"""A plugin that ends the process while it is imported, without Python knowing."""

import os

os.write(1, b"no license found\n")
os._exit(3)
