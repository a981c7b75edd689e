"""An evaluation as tables, pictures and parts of a page, from the files of its folder alone."""
