"""The files of a checkpoint, and their values: read once, hashed before they are used."""
