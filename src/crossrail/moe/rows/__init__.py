"""Where rows are and what touches them there: host memory or a GPU's."""
