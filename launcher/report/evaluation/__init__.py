"""An evaluation as tables, plots and page sections, from the files in its folder only."""
