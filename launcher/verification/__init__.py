"""A run's own configuration, small, beside one plain process: is every part computed as one process would?"""
