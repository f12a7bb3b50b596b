"""The command line: parsing, tables and messages; everything it does is a call into the library."""
