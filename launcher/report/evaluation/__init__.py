"""An evaluation as tables, pictures and page sections, using only the files of its folder."""
