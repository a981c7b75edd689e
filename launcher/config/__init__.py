"""All settings for a run: defaults, then a TOML file, then flags. Strict, frozen, checked once."""
