"""A plugin that raises while it is imported."""

raise RuntimeError("the vendor's library is too old\nsecond line")
