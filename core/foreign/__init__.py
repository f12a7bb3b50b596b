"""Models of no family: transformers' own modelling code with our paged attention. Imports torch when it is used."""
