"""Models as data (ModelSpec) and one forward function per kind of model."""
