"""Where records come from: every form of data people have, read in order, each unusable record with its place.

``files.expand`` turns the names of a run file into source files, ``read.read_records`` reads one of them, and
``raw.parse`` turns unparsed JSON into a record. Nothing is mended or guessed: what cannot be read is refused by name.
"""
